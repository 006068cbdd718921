"""Shared by the signatures: layouts, slots, and the error of a missing gradient."""

import torch

# --- Gradients ------------------------------------------------------------------------------------


class NoGradient(torch.autograd.Function):
    """Makes results that depend on inputs which require gradients, and whose backward is an
    error."""

    @staticmethod
    def forward(ctx, name, run, *inputs):
        ctx.name = name
        result = run()
        # .data makes new tensors, which a caller may change in place, unlike views under autograd.
        return tuple(x.data for x in result) if isinstance(result, tuple) else result.data

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(f"{ctx.name} of lockstep.ops has no gradient: it serves "
                                  "inference")


def forward_only(name, run, *inputs):
    """Returns run(), whose results are new tensors that depend on `inputs`."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return NoGradient.apply(name, run, *inputs)
    return run()


# --- Arguments ------------------------------------------------------------------------------------


def refuse(function, **arguments):
    """Raises NotImplementedError for the first argument that is set: no operator supports it."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{function}: {name} is not supported by lockstep.ops")


def expect(holds, name, expected, got):
    if not holds:
        raise ValueError(f"{name} is expected to be {expected}; got {got}")


def activation_name(activation):
    """The operators' name of an activation given as None, a bool, "silu" or "swish"."""
    if activation in (None, False):
        return "none"
    if activation in (True, "silu", "swish"):
        return "silu"
    raise NotImplementedError(f'activation is expected to be None, "silu" or "swish"; got '
                              f"{activation!r}")


def int32(indices):
    """Indices in the operators' type. One that it cannot hold is refused; on a GPU, from which
    nothing is read, it becomes the largest or the least, never another slot."""
    if indices is None or indices.dtype == torch.int32:
        return indices
    what, type = "a list of slots, starts or counts", indices.dtype
    expect(not (type.is_floating_point or type == torch.bool), what, "of integers", type)
    limits = torch.iinfo(torch.int32)
    within = indices.clamp(limits.min, limits.max)
    if indices.device.type == "cpu":
        expect(torch.equal(within, indices), what, "within 32 bits", indices.flatten().tolist()[:8])
    return within.to(torch.int32)


def even_starts(rows, size, device):
    """The starts of rows of `size` tokens each, and the end: [rows + 1]."""
    if size == 0:
        return torch.zeros(rows + 1, dtype=torch.int32, device=device)
    return torch.arange(0, rows * size + 1, size, dtype=torch.int32, device=device)


def dense_rows(tensor):
    """The tensor, or a copy whose last dimension is contiguous."""
    if tensor is None or tensor.size(-1) <= 1 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def flushing_positions(flush, cursors, size):
    """Positions at which the operators write the states of the rows that flush, and of no others before
    the last entry of their rings of `size`: they do so at the last entry of a window."""
    return torch.where(flush != 0, size - 1, cursors)


def give(out, result):
    """The result, written to the caller's tensor if there is one."""
    if out is None:
        return result
    expect(out.shape == result.shape, "out", tuple(result.shape), tuple(out.shape))
    return out.copy_(result)


# --- Slots ----------------------------------------------------------------------------------------


def named(indices, pad):
    """Which rows have a slot: [N] bool."""
    return (indices >= 0) & (indices != pad)


def read_slots(pool, indices):
    """A copy of the rows' slots of a pool; unspecified for a row without a slot."""
    return pool.index_select(0, indices.clamp(min=0))


def write_slots(pool, indices, pad, rows):
    """pool[indices] = rows for the rows that have a slot, without reading from the device which do.

    A row without a slot repeats the first row that has one; if no row has one, slot 0 is rewritten
    with its own contents.
    """
    if indices.numel() == 0:
        return
    has = named(indices, pad)
    first = has.to(torch.int8).argmax(keepdim=True)
    slots = torch.where(has, indices, indices[first]).clamp(min=0)
    shape = [-1] + [1] * (rows.dim() - 1)
    rows = torch.where(has.view(shape), rows, rows[first])
    rows = torch.where(has.any(), rows, pool.index_select(0, slots))
    pool.index_copy_(0, slots.long(), rows.to(pool.dtype))

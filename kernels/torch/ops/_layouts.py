"""What the signatures share: layouts, slots, and what stands in for a gradient."""

import torch

# --- Gradients ------------------------------------------------------------------------------------


class NoGradient(torch.autograd.Function):
    """Results of an operator whose inputs require gradients: asking for one is an error."""

    @staticmethod
    def forward(ctx, name, run, *inputs):
        ctx.name = name
        result = run()
        # Tensors of their own, which a caller may change in place: autograd forbids that for views.
        return tuple(x.data for x in result) if isinstance(result, tuple) else result.data

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError(f"{ctx.name} of lockstep.ops has no gradient: it serves "
                                  "inference")


def forward_only(name, run, *inputs):
    """run(), whose results are new tensors that depend on `inputs`."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return NoGradient.apply(name, run, *inputs)
    return run()


# --- Arguments ------------------------------------------------------------------------------------


def refuse(function, **arguments):
    """NotImplementedError for the first argument that is set: what no operator here can do."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{function}: {name} is not supported by lockstep.ops")


def expect(holds, name, expected, got):
    if not holds:
        raise ValueError(f"{name} is expected to be {expected}; got {got}")


def activation_name(activation):
    """The operators' word for None, a bool, "silu" or "swish"."""
    if activation in (None, False):
        return "none"
    if activation in (True, "silu", "swish"):
        return "silu"
    raise NotImplementedError(f'activation is expected to be None, "silu" or "swish"; got '
                              f"{activation!r}")


def int32(indices):
    """Indices in the operators' type."""
    return None if indices is None else indices.to(torch.int32)


def even_starts(rows, size, device):
    """Where rows of `size` tokens each begin and end: [rows + 1]."""
    return torch.arange(0, rows * size + 1, size, dtype=torch.int32, device=device)


def dense_rows(tensor):
    """The tensor with its last dimension contiguous: itself, if it is."""
    if tensor is None or tensor.size(-1) <= 1 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()


def give(out, result):
    """The result, in the caller's tensor if there is one."""
    if out is None:
        return result
    expect(out.shape == result.shape, "out", tuple(result.shape), tuple(out.shape))
    return out.copy_(result)


# --- Slots ----------------------------------------------------------------------------------------


def named(indices, pad):
    """Which rows have a slot: [N] bool."""
    return (indices >= 0) & (indices != pad)


def read_slots(pool, indices):
    """The rows' slots of a pool, copied; anything for a row without one."""
    return pool.index_select(0, indices.clamp(min=0))


def write_slots(pool, indices, pad, rows):
    """pool[indices] = rows for the rows that have a slot, without asking the device which.

    A row without one repeats the first row that has; where there is none, slot 0 gets what it has.
    """
    has = named(indices, pad)
    first = has.to(torch.int8).argmax(keepdim=True)
    slots = torch.where(has, indices, indices[first]).clamp(min=0)
    shape = [-1] + [1] * (rows.dim() - 1)
    rows = torch.where(has.view(shape), rows, rows[first])
    rows = torch.where(has.any(), rows, pool.index_select(0, slots))
    pool.index_copy_(0, slots.long(), rows.to(pool.dtype))

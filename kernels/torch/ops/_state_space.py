"""State-space models, shared by all signatures: a step of selective_state_update, and prompts."""

import torch

from ._conv import starts_of_segments
from ._layouts import dense_rows, expect, forward_only, int32, refuse
from ._library import operators


def update(function, state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, slots, *, out_slots=None,
           pad=-1, starts=None, accepted=None, read_only=False, snapshots=None, parents=None):
    """A step of tokens x [T, H, P], or [T, dim] of a model without heads; the result has x's shape.

    state [slots, H, P, N] or [slots, dim, N], written in place. With starts a row has any number of
    tokens, else each token is a row. slots [rows] or [rows, tokens], likewise out_slots.
    """
    heads = state.dim() == 4
    tokens, pool = x, state
    if not heads:
        pool, tokens = state.unsqueeze(1), x.unsqueeze(1)
        dt, z, dt_bias, D = (None if one is None else one.unsqueeze(-2)
                             for one in (dt, z, dt_bias, D))
        A = A.unsqueeze(0)
    if B.dim() == 2:
        B, C = B.unsqueeze(1), C.unsqueeze(1)
    if B.dtype != C.dtype or B.dtype not in (x.dtype, torch.float32):
        B, C = B.float(), C.float()

    def run():
        return operators.selective_state_update(
            pool, dense_rows(tokens), dt, A.float(), dense_rows(B), dense_rows(C), D=D, z=z,
            dt_bias=dt_bias, dt_softplus=bool(dt_softplus), state_indices=int32(slots),
            state_out_indices=int32(out_slots), query_start_loc=int32(starts),
            num_accepted_tokens=int32(accepted), snapshots=snapshots, parents=parents,
            read_only=read_only, pad_slot_id=pad if slots is not None else -1)

    out = forward_only(function, run, x, dt, A, B, C, D, z, dt_bias)
    return out if heads else out.squeeze(1)


def ring_update(function, state, rings, x, dt, A, B, C, cursors, positions, D, z, dt_bias,
                dt_softplus, slots, pad):
    """A step of every row beside rings (x, B, dt) of what its state has not seen."""
    dt, D, dt_bias, A = (of_heads(one, argument, sizes) for one, argument, sizes in (
        (dt, "dt", 2), (D, "D", 1), (dt_bias, "dt_bias", 1), (A, "A", 1)))

    def run():
        return operators.selective_state_ring_update(
            state, *rings, dense_rows(x), dt, A.float(), dense_rows(B), dense_rows(C),
            int32(cursors), int32(positions), D=D, z=z, dt_bias=dt_bias,
            dt_softplus=bool(dt_softplus), state_indices=int32(slots),
            pad_slot_id=pad if slots is not None else -1)

    return forward_only(function, run, x, dt, A, B, C, D, z, dt_bias)


def of_heads(tensor, argument, sizes):
    """The tensor with its first `sizes` dimensions, over whose others its numbers are repeated."""
    if tensor is None or tensor.dim() == sizes:
        return tensor
    expect(all(size <= 1 or stride == 0
               for size, stride in zip(tensor.shape[sizes:], tensor.stride()[sizes:])),
           argument, "one number per head, repeated by strides of 0", tensor.stride())
    return tensor[(slice(None),) * sizes + (0,) * (tensor.dim() - sizes)]


def scan(function, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial, segments, starts,
         want_final, want_each):
    """Prompts x [B, S, H, P], of which segments [B, S] or starts [N + 1] name the sequences: the
    output, or (output, states after the sequences)."""
    expect(x.dim() == 4, "x", "[B, S, H, P]", tuple(x.shape))
    rows, shape, N = x.size(0), x.shape, B.size(-1)
    if want_each:
        expect(rows == 1, "x", "[1, S, H, P] with return_varlen_states", tuple(shape))
        expect(starts is not None, "cu_seqlens", "given with return_varlen_states", "none")
        expect(segments is not None, "seq_idx", "given with return_varlen_states", "none")
        rows = starts.numel() - 1
    if segments is not None:
        refuse(function + " with seq_idx", initial_states=initial, return_final_states=want_final)
        if starts is None:
            starts = starts_of_segments(segments)
    common = torch.promote_types(x.dtype, torch.promote_types(B.dtype, C.dtype))
    x, B, C, z = (None if one is None else dense_rows(one.to(common)) for one in (x, B, C, z))
    if starts is not None:
        x, dt, B, C, z = (None if one is None else one.flatten(0, 1) for one in (x, dt, B, C, z))
    wanted = want_final or want_each

    def run():
        states = resumes = None
        if initial is not None:
            states = initial.to(torch.float32, copy=True)
        elif wanted:
            states = torch.empty((rows, *shape[2:], N), dtype=torch.float32, device=x.device)
            resumes = torch.zeros(rows, dtype=torch.bool, device=x.device)
        low, high = dt_limit
        out = operators.ssd_prefill(
            x, dt, A.float(), B, C, states, D=D, z=z, dt_bias=dt_bias,
            dt_softplus=bool(dt_softplus), dt_min=float(low),
            dt_max=None if high == float("inf") else float(high), query_start_loc=int32(starts),
            has_initial_state=resumes)
        out = out.view(shape)
        return (out, states) if wanted else out

    return forward_only(function, run, x, dt, A, B, C, D, z, dt_bias, initial)

"""The step of a state-space model behind every signature of selective_state_update."""

import torch

from ._layouts import dense_rows, forward_only, int32
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

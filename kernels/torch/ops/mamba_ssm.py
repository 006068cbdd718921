"""The signature of mamba-ssm 2.3.2, over lockstep's operators."""

from . import _state_space


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None):
    """One token of every row: state [B or slots, H, P, N] one step on, and the output [B, H, P].

    x, dt, z [B, H, P]; A [H, P, N] float32; B, C [B, G, N]; D, dt_bias [H, P]; or all of them
    without H. dt, A, D and dt_bias of one number per head may come as such: [B, H], [H].
    state_batch_indices [B] names each row's slot; a row whose entry is below 0 gives zeros and
    leaves the states alone.
    """
    return _state_space.update("selective_state_update", state, x, dt, A, B, C, D, z, dt_bias,
                               dt_softplus, state_batch_indices)

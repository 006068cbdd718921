"""The signatures of mamba-ssm 2.3.2, over lockstep's operators."""

import torch

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


def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
                      return_last_state=False):
    """Whole sequences of Mamba1 from states of 0: u, delta, z and the output [B, D, S]; A [D, N];
    B, C [B, N, S] or [B, 1, N, S]; D, delta_bias [D]. With return_last_state the states [B, D, N]
    after the sequences come after the output, in float32."""
    states = u.new_empty((u.size(0), *A.shape), dtype=torch.float32)
    out = _state_space.prompts("selective_scan_fn", u, delta, A, B, C, D, z, delta_bias,
                               delta_softplus, states,
                               resumes=u.new_zeros(u.size(0), dtype=torch.bool))
    return (out, states) if return_last_state else out


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None,
                              initial_states=None, seq_idx=None, cu_seqlens=None,
                              dt_softplus=False, dt_limit=(0.0, float("inf")),
                              return_final_states=False, return_varlen_states=False,
                              state_dtype=None):
    """Whole sequences: x, z and the output [B, S, H, P]; dt [B, S, H]; B, C [B, S, G, N]; A,
    dt_bias [H]; D [H] or [H, P]. After the output come, if asked for, the states [B, H, P, N]
    after the sequences, in float32; initial_states are those before them.

    seq_idx [B, S] numbers the sequence of each token; each sequence starts from a state of 0. With
    it there are neither initial nor final states. With return_varlen_states B is 1, cu_seqlens
    [N + 1] says the same as seq_idx, and the states [N, H, P, N] after its sequences come after
    the output. The size of chunks is the operator's own, and so is the type of a running state:
    float32, whatever chunk_size and state_dtype say.
    """
    del chunk_size, state_dtype
    return _state_space.scan("mamba_chunk_scan_combined", x, dt, A, B, C, D, z, dt_bias,
                             dt_softplus, dt_limit, initial_states, seq_idx,
                             cu_seqlens if return_varlen_states else None, return_final_states,
                             return_varlen_states)

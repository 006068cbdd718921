"""The signatures of causal-conv1d 1.7.0 (Dao-AILab), over lockstep's operators.

x is [B, D] or [B, D, S]; weight [D, W], W from 2 to 4; bias [D]; a state [B or slots, D, C] with C
at least W - 1, oldest column first.
"""

import torch

from . import _conv
from ._layouts import forward_only, give, refuse


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None,
                         conv_state_indices=None):
    """A step of every row; its state becomes the last C columns of state and x.

    conv_state_indices [B] names each row's slot; a row whose entry is below 0 gives zeros and
    leaves the states alone. With cache_seqlens [B] a state is a ring whose column
    cache_seqlens % C is written next; that costs two more copies of the states.
    """
    name = "causal_conv1d_update"
    if cache_seqlens is not None:
        return _conv.update_ring(name, x, conv_state, weight, bias, activation, conv_state_indices,
                                 cache_seqlens)
    return _conv.update(name, x, conv_state, weight, bias, activation, conv_state_indices)


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None,
                     return_final_states=False, final_states_out=None, activation=None):
    """Whole sequences [B, D, S]; with return_final_states also the states [B, D, W - 1] after
    them, in final_states_out if that is given.

    seq_idx [B, S] numbers the sequence of each token; tokens with number -1 are padding and give
    zeros. With it there are neither initial nor final states.
    """
    name = "causal_conv1d_fn"
    tokens = x.transpose(1, 2)  # [B, S, D]
    rows, size, channels = tokens.shape
    if seq_idx is not None:
        refuse(name + " with seq_idx", initial_states=initial_states,
               return_final_states=return_final_states, final_states_out=final_states_out)

        def run_segments():
            out = _conv.prefill(tokens.reshape(rows * size, channels), weight, bias, activation,
                                starts=_conv.starts_of_segments(seq_idx))
            return out.masked_fill_((seq_idx < 0).view(-1, 1), 0)

        out = forward_only(name, run_segments, x, weight, bias)
        return out.view(rows, size, channels).transpose(1, 2)

    def run():
        states = resumes = None
        if initial_states is not None:
            states = initial_states.clone()
        elif return_final_states:
            columns = weight.size(1) - 1
            states = torch.empty_strided(
                (rows, channels, columns), (channels * columns, 1, channels), dtype=x.dtype,
                device=x.device)
            resumes = torch.zeros(rows, dtype=torch.bool, device=x.device)
        out = _conv.prefill(tokens, weight, bias, activation, states, resumes=resumes)
        return (out, states) if return_final_states else out

    result = forward_only(name, run, x, weight, bias, initial_states)
    if not return_final_states:
        return result.transpose(1, 2)
    return result[0].transpose(1, 2), give(final_states_out, result[1])

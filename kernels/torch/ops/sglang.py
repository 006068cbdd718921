"""The signatures of SGLang 0.5.23, over lockstep's operators.

A row whose slot is pad_slot_id (-1) or below 0 gives zeros and leaves the states alone. Results are
new tensors, or `out`; inputs are never overwritten. Trees of drafts come as retrieve_parent_token
[B, T]; the convolution does not take them.
"""

import torch

from . import _conv, _delta_rule, _state_space
from ._layouts import even_starts, expect, flushing_positions, give, int32, refuse, write_slots

PAD_SLOT_ID = -1


def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, seq_lens_cpu=None,
                     cache_indices=None, has_initial_state=None, activation="silu",
                     pad_slot_id=PAD_SLOT_ID, validate_data=False, block_table=None, **kwargs):
    """Packed prompts x [D, T] beside a pool [slots, D, C], whose first W - 1 columns are used."""
    del seq_lens_cpu, validate_data, kwargs
    refuse("causal_conv1d_fn", block_table=block_table)
    return _conv.prefill_pool("causal_conv1d_fn", x, weight, bias, conv_states, query_start_loc,
                              cache_indices, has_initial_state, activation, pad_slot_id)


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None,
                         conv_state_indices=None, num_accept_tokens=None,
                         intermediate_conv_window=None, intermediate_state_indices=None,
                         retrieve_next_token=None, retrieve_next_sibling=None,
                         retrieve_parent_token=None, pad_slot_id=PAD_SLOT_ID, metadata=None,
                         validate_data=False):
    """A step, x [B, D] or [B, D, S]. With intermediate_conv_window [rows, steps, D, W - 1] the
    history after every token goes there, to row intermediate_state_indices[b]."""
    name = "causal_conv1d_update"
    del metadata, validate_data
    refuse(name, cache_seqlens=cache_seqlens, retrieve_next_token=retrieve_next_token,
           retrieve_next_sibling=retrieve_next_sibling, retrieve_parent_token=retrieve_parent_token)
    state = conv_state
    if num_accept_tokens is None:
        state = conv_state[:, :, : weight.size(1) - 1]
    if intermediate_conv_window is None:
        return _conv.update(name, x, state, weight, bias, activation, conv_state_indices,
                            pad=pad_slot_id, accepted=num_accept_tokens)
    refuse(name + " with intermediate_conv_window", num_accept_tokens=num_accept_tokens)
    rows, channels = x.shape[:2]
    size = x.size(2) if x.dim() == 3 else 1
    windows = state.new_empty(rows * size, channels, state.size(2))
    out = _conv.update(name, x, state, weight, bias, activation, conv_state_indices,
                       pad=pad_slot_id, snapshots=windows)
    windows = windows.view(rows, size, channels, state.size(2))
    slots = _rows(conv_state_indices, rows, x.device)
    own = slots if intermediate_state_indices is None else int32(intermediate_state_indices)
    own = _with_slot(own, slots, pad_slot_id)
    write_slots(intermediate_conv_window[:, :size], own, -1, windows)
    write_slots(state, slots, pad_slot_id, windows[:, -1])
    return out


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None, pad_slot_id=PAD_SLOT_ID, out=None,
                           disable_state_update=False, intermediate_states_buffer=None,
                           cache_steps=None, retrieve_parent_token=None,
                           intermediate_state_indices=None, enable_stochastic_rounding=False,
                           cache_philox_rounds=0):
    """A step, x [B, H, P] or [B, dim]; or T tokens of every row, x [B, T, H, P].

    With disable_state_update the states are only read; with intermediate_states_buffer
    [rows, cache_steps, H, P, N] the state after every token goes there, to row
    intermediate_state_indices[b], which needs disable_state_update.
    """
    name = "selective_state_update"
    del cache_steps, cache_philox_rounds
    refuse(name, enable_stochastic_rounding=enable_stochastic_rounding)
    starts = None
    rows, size, packed = x.size(0), 1, x
    if x.dim() == 4:
        size = x.size(1)
        starts = even_starts(rows, size, x.device)
        packed, dt, B, C, z = (None if one is None else one.flatten(0, 1)
                               for one in (x, dt, B, C, z))
    verification = _Verification(state, rows, size, state_batch_indices, pad_slot_id,
                                 disable_state_update, intermediate_states_buffer,
                                 intermediate_state_indices, retrieve_parent_token)
    found = _state_space.update(
        name, state, packed, dt, A, B, C, D, z, dt_bias, dt_softplus, state_batch_indices,
        pad=pad_slot_id, starts=starts, **verification.arguments())
    verification.keep()
    return give(out, found.view(x.shape))


class _Verification:
    """The results of a verification: states after every token, in a buffer with rows of its own."""

    def __init__(self, state, rows, size, slots, pad, read_only, buffer, buffer_rows, parents):
        expect(buffer is None or read_only, "disable_state_update",
               "true with intermediate_states_buffer", read_only)
        expect(parents is None or buffer is not None, "intermediate_states_buffer",
               "given with retrieve_parent_token", "none")
        self.rows, self.size, self.pad, self.read_only = rows, size, pad, bool(read_only)
        self.slots = _rows(slots, rows, state.device) if buffer is not None else None
        self.buffer, self.buffer_rows, self.parents = buffer, buffer_rows, parents
        self.snapshots = None
        if buffer is not None:
            expect(buffer.dtype == state.dtype, "intermediate_states_buffer", state.dtype,
                   buffer.dtype)
            shape = state.shape[1:] if state.dim() == 4 else (1, *state.shape[1:])
            self.snapshots = state.new_empty(rows * size, *shape)

    def arguments(self):
        """The operator's arguments: parents are numbered within the row, and -1 for its first."""
        parents = self.parents
        if parents is not None:
            parents = int32(parents).clone()
            parents[:, 0] = -1
            parents = parents.flatten()
        return {"read_only": self.read_only, "snapshots": self.snapshots, "parents": parents}

    def keep(self):
        if self.buffer is None:
            return
        own = self.slots if self.buffer_rows is None else int32(self.buffer_rows)
        states = self.snapshots.view(self.rows, self.size, *self.buffer.shape[2:])
        write_slots(self.buffer[:, : self.size], _with_slot(own, self.slots, self.pad), -1, states)


def _rows(slots, rows, device):
    """The rows' slots: the given ones, or the rows' own numbers."""
    if slots is None:
        return torch.arange(rows, dtype=torch.int32, device=device)
    return int32(slots)


def _with_slot(own, slots, pad):
    """`own`, with -1 for rows without a slot."""
    return torch.where((slots >= 0) & (slots != pad), own, -1)


def fused_recurrent_gated_delta_rule(q, k, v, g, beta=None, scale=None, initial_state=None,
                                     output_final_state=False, cu_seqlens=None,
                                     use_qk_l2norm_in_kernel=False):
    """Token by token: (outputs, final states [N, HV, V, K] float32 or None)."""
    tokens = _delta_rule.Tokens(q, k, v, g, beta, cu_seqlens)
    return _delta_rule.own_rows("fused_recurrent_gated_delta_rule", "update", tokens, None, None,
                                scale, initial_state, output_final_state, True,
                                use_qk_l2norm_in_kernel)


def fused_recurrent_gated_delta_rule_update(q, k, v, g, beta=None, scale=None,
                                            initial_state_source=None, initial_state_indices=None,
                                            cu_seqlens=None, use_qk_l2norm_in_kernel=False,
                                            disable_state_update=False,
                                            disable_output_calculation=False,
                                            intermediate_states_buffer=None,
                                            intermediate_state_indices=None, cache_steps=None,
                                            retrieve_parent_token=None):
    """A step or a verification over a pool initial_state_source [slots, HV, V, K]. Outputs are
    computed with disable_output_calculation too."""
    del disable_output_calculation, cache_steps
    return _pool_rows("fused_recurrent_gated_delta_rule_update",
                      _delta_rule.Tokens(q, k, v, g, beta, cu_seqlens), initial_state_source,
                      initial_state_indices, disable_state_update, intermediate_states_buffer,
                      intermediate_state_indices, retrieve_parent_token, scale=scale,
                      normalise=use_qk_l2norm_in_kernel)


def fused_sigmoid_gating_delta_rule_update(A_log, a, dt_bias, softplus_beta, softplus_threshold, q,
                                           k, v, b, initial_state_source, initial_state_indices,
                                           scale=None, use_qk_l2norm_in_kernel=False,
                                           cu_seqlens=None, is_kda=False, lower_bound=None,
                                           disable_state_update=False,
                                           intermediate_states_buffer=None,
                                           intermediate_state_indices=None, cache_steps=None,
                                           retrieve_parent_token=None, **kwargs):
    """The same with gates made of a and b: g = -exp(A_log) softplus(a + dt_bias), beta =
    sigmoid(b). Of softplus, beta is 1 and the threshold 20; is_kda, lower_bound and the rings of
    replays are not supported."""
    name = "fused_sigmoid_gating_delta_rule_update"
    del cache_steps
    refuse(name, is_kda=is_kda, lower_bound=lower_bound, **kwargs)
    expect(softplus_beta == 1.0, "softplus_beta", 1, softplus_beta)
    expect(softplus_threshold == 20.0, "softplus_threshold", 20, softplus_threshold)
    return _pool_rows(name, _delta_rule.Tokens(q, k, v, a, b, cu_seqlens), initial_state_source,
                      initial_state_indices, disable_state_update, intermediate_states_buffer,
                      intermediate_state_indices, retrieve_parent_token, scale=scale,
                      normalise=use_qk_l2norm_in_kernel, A_log=A_log, dt_bias=dt_bias)


def _pool_rows(name, tokens, pool, slots, read_only, buffer, buffer_rows, parents, **more):
    expect(pool is not None, "initial_state_source", "a pool [slots, HV, V, K]", "none")
    size = tokens.q.size(0) // max(tokens.rows, 1)
    expect(buffer is None or tokens.rows * size == tokens.q.size(0), "cu_seqlens",
           "rows of one length with intermediate_states_buffer", tokens.q.size(0))
    verification = _Verification(pool, tokens.rows, size, slots, PAD_SLOT_ID, read_only, buffer,
                                 buffer_rows, parents)
    out = _delta_rule.pool_rows(name, tokens, pool, slots, pad=PAD_SLOT_ID,
                                **verification.arguments(), **more)
    verification.keep()
    return out


def fused_recurrent_gated_delta_rule_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale,
                                                   initial_state, out, ssm_state_indices,
                                                   use_qk_l2norm_in_kernel=False):
    """One token of every row, whose q, k and v lie side by side in mixed_qkv [B, 2 H K + HV V]:
    (out [B, 1, HV, V], the pool)."""
    return _delta_rule.packed_decode(mixed_qkv, a, b, initial_state, out, ssm_state_indices,
                                     A_log=A_log, dt_bias=dt_bias, scale=scale,
                                     normalise=use_qk_l2norm_in_kernel, pad=PAD_SLOT_ID)


def fused_recurrent_linear_replayssm_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state,
                                            d_cache, k_cache, g_cache, out, ssm_state_indices,
                                            write_pos, force_flush=None,
                                            use_qk_l2norm_in_kernel=False, is_kda=False,
                                            block_v=None, num_warps=1, num_stages=3, nk=2):
    """The same over states that are written where force_flush [B] is set or write_pos [B] is L - 1:
    otherwise the token becomes entry write_pos of its slot's ring: d_cache [slots, HV, L, V] in the
    states' type, k_cache [slots, H, L, K] in mixed_qkv's (SGLang has it in the states'), g_cache
    [slots, HV, L] float32, L of 1 to 16. The caller advances write_pos. is_kda is not supported."""
    name = "fused_recurrent_linear_replayssm_decode"
    del block_v, num_warps, num_stages, nk
    refuse(name, is_kda=is_kda)
    positions = write_pos
    if force_flush is not None:
        positions = flushing_positions(force_flush, write_pos, d_cache.size(2))
    return _delta_rule.packed_ring_decode(
        name, mixed_qkv, a, b, initial_state, (d_cache, k_cache, g_cache), out, ssm_state_indices,
        write_pos, positions, A_log=A_log, dt_bias=dt_bias, scale=scale,
        normalise=use_qk_l2norm_in_kernel, pad=PAD_SLOT_ID)

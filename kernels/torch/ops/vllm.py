"""The signatures of vLLM 0.33.0, over lockstep's operators.

Slot 0 is the null block: a row whose entry is null_block_id (0) or below 0 gives zeros and leaves
the states alone. Results are new tensors, or `out`; inputs are never overwritten.
"""

from . import _conv, _delta_rule, _state_space
from ._layouts import expect, flushing_positions, give, refuse

PAD_SLOT_ID = -1
NULL_BLOCK_ID = 0


def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices=None,
                     has_initial_state=None, activation="silu", pad_slot_id=PAD_SLOT_ID,
                     null_block_id=NULL_BLOCK_ID, metadata=None, validate_data=False):
    """Packed prompts x [D, T] beside a pool [slots, D, C], whose first W - 1 columns are used.
    metadata, a schedule for vLLM's kernel, is ignored."""
    del metadata, validate_data
    expect(pad_slot_id is None or pad_slot_id < 0 or pad_slot_id == null_block_id, "pad_slot_id",
           "below 0, or null_block_id", pad_slot_id)
    return _conv.prefill_pool("causal_conv1d_fn", x, weight, bias, conv_states, query_start_loc,
                              cache_indices, has_initial_state, activation, null_block_id)


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None,
                         num_accepted_tokens=None, query_start_loc=None, max_query_len=-1,
                         null_block_id=NULL_BLOCK_ID, validate_data=False, out=None):
    """A step, x [B, D] or [B, D, S], or packed [T, D] with query_start_loc. States have W - 1
    columns, oldest first; with num_accepted_tokens W - 1 + the longest row - 1, and column
    num_accepted_tokens - 1 is a row's oldest. Without out the result is a new tensor."""
    del max_query_len, validate_data
    state = conv_state
    if num_accepted_tokens is None:
        state = conv_state[:, :, : weight.size(1) - 1]
    pad = -1 if null_block_id is None else null_block_id
    return give(out, _conv.update("causal_conv1d_update", x, state, weight, bias, activation,
                                  conv_state_indices, pad=pad, starts=query_start_loc,
                                  accepted=num_accepted_tokens))


def selective_state_update(state, x, dt, A, B, C, D, dt_bias, z=None, dt_softplus=False,
                           state_batch_indices=None, dst_state_batch_indices=None,
                           null_block_id=NULL_BLOCK_ID, out=None, num_accepted_tokens=None,
                           cu_seqlens=None, is_blackwell=False, enable_stochastic_rounding=False,
                           cache_philox_rounds=0):
    """A step of every row, or with cu_seqlens of its tokens. With num_accepted_tokens the lists of
    slots are tables [N, tokens]: a row reads column num_accepted_tokens - 1 and writes the state
    after its token i to column i."""
    del is_blackwell, cache_philox_rounds
    refuse("selective_state_update", enable_stochastic_rounding=enable_stochastic_rounding)
    rows = x.size(0) if cu_seqlens is None else cu_seqlens.numel() - 1
    source, target = (_slots(each, rows, num_accepted_tokens is not None)
                      for each in (state_batch_indices, dst_state_batch_indices))
    return give(out, _state_space.update(
        "selective_state_update", state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, source,
        out_slots=target, pad=null_block_id, starts=cu_seqlens, accepted=num_accepted_tokens))


def selective_state_update_replayssm_output_only(
        state, x, dt, A, B, C, D=None, dt_bias=None, z=None, dt_softplus=False, x_cache=None,
        dt_cache=None, B_cache=None, bc_pre=None, write_pos=None, is_flush=None, max_cache_len=16,
        state_batch_indices=None, null_block_id=NULL_BLOCK_ID, out=None,
        enable_stochastic_rounding=False, cache_philox_rounds=0):
    """A step of every row, x [B, H, P], over states that are written where is_flush [B] is set:
    otherwise the token becomes entry write_pos [B] of its slot's ring: x_cache [slots, H, L, P],
    dt_cache [slots, H, L] and B_cache [slots, G, L, N], L = max_cache_len of 1 to 16. The entries
    before it are read. The last entry, L - 1, is written to the state alone, so is_flush has to be
    set there, as vLLM does. dt, A, D and dt_bias are one number per head: strides of 0, or
    [B, H] and [H]. bc_pre, scratch of vLLM's kernels, is ignored."""
    name = "selective_state_update_replayssm_output_only"
    del bc_pre, cache_philox_rounds
    refuse(name, enable_stochastic_rounding=enable_stochastic_rounding)
    for argument, given in (("x_cache", x_cache), ("dt_cache", dt_cache), ("B_cache", B_cache),
                            ("write_pos", write_pos), ("is_flush", is_flush)):
        expect(given is not None, argument, f"given to {name}", "none")
    expect(x_cache.size(2) == max_cache_len, "max_cache_len", f"the {x_cache.size(2)} of x_cache",
           max_cache_len)
    rows = x.size(0)
    cursors = write_pos[:rows]
    positions = flushing_positions(is_flush[:rows], cursors, max_cache_len)
    return give(out, _state_space.ring_update(
        name, state, (x_cache, B_cache, dt_cache), x, dt, A, B, C, cursors, positions, D, z, dt_bias,
        dt_softplus, _slots(state_batch_indices, rows, False), null_block_id))


def _slots(slots, rows, verifies):
    """A list of slots, or a table where a verification reads it: its first `rows` rows."""
    if slots is None:
        return None
    slots = slots[:rows]
    if verifies:
        return slots if slots.dim() == 2 else slots.unsqueeze(1)
    return slots[:, 0] if slots.dim() == 2 else slots


def fused_recurrent_gated_delta_rule(q, k, v, g, beta=None, scale=None, initial_state=None,
                                     inplace_final_state=True, cu_seqlens=None,
                                     ssm_state_indices=None, num_accepted_tokens=None,
                                     use_qk_l2norm_in_kernel=False):
    """A step or a verification over a pool initial_state [slots, HV, V, K]: (outputs, states).

    In place, the pool is returned; with a table [N, tokens] of slots the state after token i goes
    to column i. Otherwise the pool is read, and the states after every token are returned,
    [T, HV, V, K].
    """
    tokens = _delta_rule.Tokens(q, k, v, g, beta, cu_seqlens)
    return _pool_rows("fused_recurrent_gated_delta_rule", tokens, initial_state,
                      inplace_final_state, ssm_state_indices, num_accepted_tokens, scale=scale,
                      normalise=use_qk_l2norm_in_kernel)


def fused_sigmoid_gating_delta_rule_update(A_log, a, b, dt_bias, q, k, v, beta=1.0, threshold=20.0,
                                           scale=None, initial_state=None, inplace_final_state=True,
                                           cu_seqlens=None, ssm_state_indices=None,
                                           num_accepted_tokens=None, use_qk_l2norm_in_kernel=False,
                                           is_kda=False):
    """The same with gates made of a and b [T, HV]: g = -exp(A_log) softplus(a + dt_bias), beta =
    sigmoid(b). Of softplus, beta is 1 and threshold 20; is_kda is not supported."""
    name = "fused_sigmoid_gating_delta_rule_update"
    refuse(name, is_kda=is_kda)
    expect(beta == 1.0, "beta", "1, of softplus", beta)
    expect(threshold == 20.0, "threshold", "20, of softplus", threshold)
    tokens = _delta_rule.Tokens(q, k, v, a, b, cu_seqlens)
    return _pool_rows(name, tokens, initial_state, inplace_final_state, ssm_state_indices,
                      num_accepted_tokens, scale=scale, normalise=use_qk_l2norm_in_kernel,
                      A_log=A_log, dt_bias=dt_bias)


def _pool_rows(name, tokens, pool, in_place, slots, accepted, **more):
    expect(pool is not None, "initial_state", "a pool [slots, HV, V, K]", "none")
    snapshots = None
    if not in_place:
        snapshots = pool.new_empty(tokens.v.size(0), *pool.shape[1:])
    out = _delta_rule.pool_rows(name, tokens, pool, slots, pad=NULL_BLOCK_ID, accepted=accepted,
                                snapshots=snapshots, **more)
    return out, pool if in_place else snapshots


def fused_recurrent_gated_delta_rule_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale,
                                                   initial_state, out, ssm_state_indices,
                                                   use_qk_l2norm_in_kernel=False):
    """One token of every row, whose q, k and v lie side by side in mixed_qkv [B, 2 H K + HV V]:
    (out [B, 1, HV, V], the pool)."""
    return _delta_rule.packed_decode(mixed_qkv, a, b, initial_state, out, ssm_state_indices,
                                     A_log=A_log, dt_bias=dt_bias, scale=scale,
                                     normalise=use_qk_l2norm_in_kernel, pad=NULL_BLOCK_ID)


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None,
                           output_final_state=False, cu_seqlens=None, chunk_indices=None,
                           chunk_offsets=None, use_qk_l2norm_in_kernel=False, core_attn_out=None):
    """Prompts by chunks: (outputs, final states [N, HV, V, K] float32 or None). chunk_indices and
    chunk_offsets are ignored."""
    del chunk_indices, chunk_offsets
    tokens = _delta_rule.Tokens(q, k, v, g, beta, cu_seqlens)
    out, final = _delta_rule.own_rows("chunk_gated_delta_rule", "prefill", tokens, None, None,
                                      scale, initial_state, output_final_state, True,
                                      use_qk_l2norm_in_kernel)
    return give(core_attn_out, out), final

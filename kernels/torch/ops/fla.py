"""The signatures of flash-linear-attention 0.6.0 (fla.ops.gated_delta_rule), over lockstep's
operators.

q, k [B, T, H, K]; v [B, T, HV, V]; g (log decay) and beta [B, T, HV]; states [N, HV, K, V], or
[N, HV, V, K] with state_v_first, returned in float32. With cu_seqlens [N + 1] B is 1 and the rows
are packed.
"""

import warnings

import torch

from . import _delta_rule
from ._layouts import refuse


def _v_first(kwargs, state_v_first):
    """Takes state_v_first, or its earlier name, out of kwargs."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise ValueError("state_v_first and its earlier name transpose_state_layout are both given")
    warnings.warn("transpose_state_layout is now called state_v_first", DeprecationWarning,
                  stacklevel=3)
    return kwargs.pop("transpose_state_layout")


def fused_recurrent_gated_delta_rule(q, k, v, g=None, gk=None, gv=None, beta=None, scale=None,
                                     initial_state=None, output_final_state=False,
                                     use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False,
                                     A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False,
                                     allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
                                     **kwargs):
    """Token by token: (outputs [B, T, HV, V], final states or None).

    gk and gv, decays of channels, are not supported.
    """
    name = "fused_recurrent_gated_delta_rule"
    state_v_first = _v_first(kwargs, state_v_first)
    refuse(name, gk=gk, gv=gv, **kwargs)
    if beta is None:
        beta = torch.ones_like(v[..., 0])
    g, beta, A_log, dt_bias = _delta_rule.gates(name, g, beta, A_log, dt_bias, use_gate_in_kernel,
                                                use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _delta_rule.own_rows(
        name, "update", _delta_rule.Tokens(q, k, v, g, beta, cu_seqlens), A_log, dt_bias, scale,
        initial_state, output_final_state, state_v_first, use_qk_l2norm_in_kernel)


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None,
                           output_final_state=False, use_qk_l2norm_in_kernel=False,
                           use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                           state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None,
                           chunk_indices=None, cp_context=None, **kwargs):
    """The same in chunks, for prompts. The operator chooses the size of chunks: chunk_size,
    chunk_indices and cu_seqlens_cpu are ignored; cp_context is not supported."""
    name = "chunk_gated_delta_rule"
    del cu_seqlens_cpu, chunk_indices
    kwargs.pop("chunk_size", None)
    state_v_first = _v_first(kwargs, state_v_first)
    gate_inside = kwargs.pop("use_gate_in_kernel", False)
    A_log, dt_bias = kwargs.pop("A_log", None), kwargs.pop("dt_bias", None)
    refuse(name, cp_context=cp_context, **kwargs)
    g, beta, A_log, dt_bias = _delta_rule.gates(name, g, beta, A_log, dt_bias, gate_inside,
                                                use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return _delta_rule.own_rows(
        name, "prefill", _delta_rule.Tokens(q, k, v, g, beta, cu_seqlens), A_log, dt_bias, scale,
        initial_state, output_final_state, state_v_first, use_qk_l2norm_in_kernel)

"""The gated delta rule, shared by all signatures: a step or a verification of rows with slots, and
prompts with states of their own.

The operators take tokens [T, H, K] and states [slots, HV, V, K]. The signatures have tokens
[B, T, H, K], which convert by a view, and some have states [.., K, V], which convert by strides.
"""

from functools import reduce

import torch
import torch.nn.functional as F

from ._layouts import dense_rows, even_starts, expect, forward_only, give, int32
from ._library import operators


class Tokens:
    """q, k [B, T, H, K], v [B, T, HV, V], g and beta [B, T, HV] of a call, as packed rows."""

    def __init__(self, q, k, v, g, beta, starts):
        expect(q.dim() == 4, "q", "[B, T, H, K]", tuple(q.shape))
        expect(starts is None or q.size(0) == 1, "q", "[1, T, H, K] beside cu_seqlens",
               tuple(q.shape))
        self.type = v.dtype
        self.shape = v.shape
        self.device = v.device
        self.rows = q.size(0) if starts is None else starts.numel() - 1
        self.starts = int32(starts)
        self.one_each = starts is None and q.size(1) == 1
        common = reduce(torch.promote_types, (x.dtype for x in (q, k, v)))
        self.q, self.k, self.v = (dense_rows(x.to(common)).flatten(0, 1) for x in (q, k, v))
        gates = v.shape[:3]
        if g is None:  # no decay
            g = torch.zeros(gates, dtype=torch.float32, device=v.device)
        if beta is None:
            beta = torch.ones(gates, dtype=torch.float32, device=v.device)
        self.g, self.beta = (x.reshape(-1, x.size(-1)) for x in (g, beta))

    def row_starts(self):
        if self.starts is None and not self.one_each:
            return even_starts(self.rows, self.shape[1], self.device)
        return self.starts

    def prompt_starts(self):
        """The rows' starts for a prefill, which needs them for rows of one token too."""
        return self.starts if self.starts is not None else even_starts(
            self.rows, self.shape[1], self.device)

    def result(self, out):
        """The operator's outputs in v's shape and type."""
        return out.view(self.shape).to(self.type)


def gates(function, g, beta, A_log, dt_bias, gate_inside, sigmoid_inside, doubled):
    """g, beta, A_log, dt_bias for the operators, which compute both gates or none. If a caller
    wants only one computed, or beta doubled, PyTorch computes it here."""
    if doubled and not sigmoid_inside:
        raise ValueError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if not gate_inside:
        A_log = dt_bias = None
    else:
        expect(A_log is not None, "A_log", "given with use_gate_in_kernel", "none")
        expect(g is not None, "g", "given with use_gate_in_kernel", "none")
        if dt_bias is None:
            dt_bias = torch.zeros_like(A_log, dtype=torch.float32)
        if sigmoid_inside and not doubled:
            return g, beta, A_log, dt_bias
        g = -A_log.float().exp() * F.softplus(g.float() + dt_bias.float())
        A_log = dt_bias = None
    if sigmoid_inside:
        beta = beta.float().sigmoid() * (2 if doubled else 1)
    return g, beta, A_log, dt_bias


def own_states(tokens, initial_state, v_first):
    """The float32 states of a call that returns them, a copy of initial_state or unwritten: in the
    caller's layout, and in the operators' layout."""
    if initial_state is not None:
        final = initial_state.to(torch.float32, copy=True)
    else:
        V, K = tokens.v.size(2), tokens.k.size(2)
        final = torch.empty((tokens.rows, tokens.v.size(1), *((V, K) if v_first else (K, V))),
                            dtype=torch.float32, device=tokens.device)
    return final, final if v_first else final.transpose(-1, -2)


def own_rows(function, operator, tokens, A_log, dt_bias, scale, initial_state, wanted, v_first,
             normalise):
    """Runs prompts whose states belong to the call: returns outputs, and the last states if
    wanted."""

    def run():
        more = {}
        state = final = None
        if initial_state is not None or wanted or operator == "update":
            final, state = own_states(tokens, initial_state, v_first)
        if operator == "update":
            if initial_state is None:
                final.zero_()
            more["query_start_loc"] = tokens.row_starts()
            call = operators.gated_delta_rule_update
        else:
            if state is not None and initial_state is None:
                more["has_initial_state"] = torch.zeros(tokens.rows, dtype=torch.bool,
                                                        device=tokens.device)
            more["query_start_loc"] = tokens.prompt_starts()
            call = operators.gated_delta_rule_prefill
        out = call(tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta, state, scale=scale,
                   A_log=A_log, dt_bias=dt_bias, use_qk_l2norm=normalise, **more)
        return (out, final) if wanted else out

    result = forward_only(function, run, tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta, A_log,
                          dt_bias, initial_state)
    out, final = result if wanted else (result, None)
    return tokens.result(out), final


def pool_rows(function, tokens, pool, slots, *, A_log=None, dt_bias=None, scale=None,
              normalise=False, pad=-1, accepted=None, read_only=False, snapshots=None,
              parents=None):
    """Runs rows whose states [slots, HV, V, K] are in a pool, which is written in place."""

    def run():
        return operators.gated_delta_rule_update(
            tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta, pool, scale=scale, A_log=A_log,
            dt_bias=dt_bias, query_start_loc=tokens.row_starts(), state_indices=int32(slots),
            num_accepted_tokens=int32(accepted), use_qk_l2norm=normalise,
            pad_slot_id=pad if slots is not None else -1, parents=parents, snapshots=snapshots,
            read_only=read_only)

    return tokens.result(forward_only(function, run, tokens.q, tokens.k, tokens.v, tokens.g,
                                      tokens.beta, A_log, dt_bias))


def packed_decode(mixed_qkv, a, b, pool, out, slots, **more):
    """One token of every row, whose q, k and v lie side by side in mixed_qkv [B, 2 H K + HV V], and
    whose gates are made of a and b [B, HV]: (out [B, 1, HV, V], the pool)."""
    HV, V, K = pool.shape[1:]
    q, k, v = packed_heads(mixed_qkv, HV, V, K)
    tokens = Tokens(q, k, v, a.unsqueeze(1), b.unsqueeze(1), None)
    found = pool_rows("fused_recurrent_gated_delta_rule_packed_decode", tokens, pool, slots, **more)
    return give(out, found), pool


def packed_ring_decode(function, mixed_qkv, a, b, pool, rings, out, slots, cursors, positions, *,
                       A_log, dt_bias, scale, normalise, pad):
    """The same beside rings (u, k, g) of what a row's state has not seen. k is in its ring as it is
    read, so what normalises it is done here."""
    HV, V, K = pool.shape[1:]
    q, k, v = (x.squeeze(1) for x in packed_heads(mixed_qkv, HV, V, K))
    if normalise:
        q, k = (unit_rows(x) for x in (q, k))
    ring_u, ring_k, ring_g = rings
    ones = torch.ones(ring_k.shape[:3], dtype=torch.float32, device=ring_k.device)

    def run():
        return operators.gated_delta_rule_ring_update(
            q, k, v, a, b, pool, ring_k, ones, ring_u, ring_g, int32(cursors), int32(positions),
            scale=scale, A_log=A_log, dt_bias=dt_bias, state_indices=int32(slots),
            pad_slot_id=pad if slots is not None else -1)

    found = forward_only(function, run, mixed_qkv, a, b, A_log, dt_bias)
    return give(out, found.unsqueeze(1)), pool


def unit_rows(x):
    """Rows of norm 1, in x's type."""
    return (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def packed_heads(mixed_qkv, heads, values, K):
    """q, k [B, 1, H, K] and v [B, 1, HV, V] of one row each, views of mixed_qkv."""
    width = mixed_qkv.size(1) - heads * values
    expect(width > 0 and width % (2 * K) == 0, "mixed_qkv", "[B, 2 H K + HV V]",
           tuple(mixed_qkv.shape))
    q, k, v = mixed_qkv.split([width // 2, width // 2, heads * values], dim=1)
    return (x.unflatten(1, (-1, size)).unsqueeze(1) for x, size in ((q, K), (k, K), (v, values)))

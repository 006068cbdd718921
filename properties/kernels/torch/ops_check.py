#!/usr/bin/env python3
# ctest: name=operators.have_the_peers_signatures labels=quick timeout=600 skip=77 python=torch args={lockstep_torch_ops}
"""lockstep.ops on the CPU: the peers' signatures beside plain loops, and what it refuses.

    properties/kernels/torch/ops_check.py build/cuda/liblockstep_torch.so

One line per function; the first difference ends the run with status 1.
"""

import argparse
import importlib
import inspect
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F

PARAMETERS = {  # names and order of the peers' arguments
    "causal_conv1d_update":
        "x conv_state weight bias activation cache_seqlens conv_state_indices",
    "causal_conv1d_fn":
        "x weight bias seq_idx initial_states return_final_states final_states_out activation",
    "selective_state_update":
        "state x dt A B C D z dt_bias dt_softplus state_batch_indices",
    "selective_scan_fn":
        "u delta A B C D z delta_bias delta_softplus return_last_state",
    "mamba_chunk_scan_combined":
        "x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus dt_limit "
        "return_final_states return_varlen_states state_dtype",
    "fused_recurrent_gated_delta_rule":
        "q k v g gk gv beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
        "use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel allow_neg_eigval "
        "state_v_first cu_seqlens kwargs",
    "chunk_gated_delta_rule":
        "q k v g beta scale initial_state output_final_state use_qk_l2norm_in_kernel "
        "use_beta_sigmoid_in_kernel allow_neg_eigval state_v_first cu_seqlens cu_seqlens_cpu "
        "chunk_indices cp_context kwargs",
    "vllm.causal_conv1d_fn":
        "x weight bias conv_states query_start_loc cache_indices has_initial_state activation "
        "pad_slot_id null_block_id metadata validate_data",
    "vllm.causal_conv1d_update":
        "x conv_state weight bias activation conv_state_indices num_accepted_tokens "
        "query_start_loc max_query_len null_block_id validate_data out",
    "vllm.selective_state_update":
        "state x dt A B C D dt_bias z dt_softplus state_batch_indices dst_state_batch_indices "
        "null_block_id out num_accepted_tokens cu_seqlens is_blackwell "
        "enable_stochastic_rounding cache_philox_rounds",
    "vllm.selective_scan_fn":
        "u ssm_states delta A B C D z delta_bias delta_softplus query_start_loc cache_indices "
        "has_initial_state null_block_id block_size block_idx_first_scheduled_token "
        "block_idx_last_scheduled_token initial_state_idx cu_chunk_seqlen last_chunk_indices",
    "vllm.selective_state_update_replayssm_output_only":
        "state x dt A B C D dt_bias z dt_softplus x_cache dt_cache B_cache bc_pre write_pos "
        "is_flush max_cache_len state_batch_indices null_block_id out "
        "enable_stochastic_rounding cache_philox_rounds",
    "vllm.fused_recurrent_gated_delta_rule":
        "q k v g beta scale initial_state inplace_final_state cu_seqlens ssm_state_indices "
        "num_accepted_tokens use_qk_l2norm_in_kernel",
    "sglang.causal_conv1d_update":
        "x conv_state weight bias activation cache_seqlens conv_state_indices num_accept_tokens "
        "intermediate_conv_window intermediate_state_indices retrieve_next_token "
        "retrieve_next_sibling retrieve_parent_token pad_slot_id metadata validate_data",
    "sglang.selective_state_update":
        "state x dt A B C D z dt_bias dt_softplus state_batch_indices pad_slot_id out "
        "disable_state_update intermediate_states_buffer cache_steps retrieve_parent_token "
        "intermediate_state_indices enable_stochastic_rounding cache_philox_rounds",
    "sglang.fused_recurrent_linear_replayssm_decode":
        "mixed_qkv a b A_log dt_bias scale initial_state d_cache k_cache g_cache out "
        "ssm_state_indices write_pos force_flush use_qk_l2norm_in_kernel is_kda block_v num_warps "
        "num_stages nk",
    "sglang.fused_recurrent_gated_delta_rule_update":
        "q k v g beta scale initial_state_source initial_state_indices cu_seqlens "
        "use_qk_l2norm_in_kernel disable_state_update disable_output_calculation "
        "intermediate_states_buffer intermediate_state_indices cache_steps retrieve_parent_token",
}


class Difference(Exception):
    """Two results that should agree do not."""


def near(found, wanted, what):
    if found.shape != wanted.shape:
        raise Difference(f"{what} is {tuple(found.shape)}, not {tuple(wanted.shape)}")
    if wanted.numel() == 0:
        return
    apart = float((found.double() - wanted.double()).abs().max())
    if not apart <= 1e-4 * (1 + float(wanted.double().abs().max())):
        raise Difference(f"{what} is {apart} apart")


def same(found, wanted, what):
    if not torch.equal(found, wanted):
        raise Difference(f"{what} differs")


def raises(kind, text, call):
    """call() raises `kind` with `text` in it."""
    try:
        call()
    except kind as error:
        if text not in str(error):
            raise Difference(f"the error says {error!s}, without {text!r}") from error
        return
    raise Difference(f"nothing was raised where {text!r} is refused")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# --- The convolution ------------------------------------------------------------------------------


def conv_row(history, x, weight, bias, silu):
    """Outputs [D, S] of a row, and history ++ x: history [D, any], its last W - 1 columns used."""
    width = weight.size(1)
    row = torch.cat([history, x], 1)
    recent = row[:, row.size(1) - x.size(1) - width + 1:]
    out = torch.stack([(recent[:, t:t + width] * weight).sum(1) for t in range(x.size(1))], 1)
    out = out + (0 if bias is None else bias[:, None])
    return (F.silu(out) if silu else out), row


def conv_data(rows, size, columns, slots, width=4, channels=6):
    return dict(x=torch.randn(rows, size, channels).transpose(1, 2),
                state=torch.randn(slots, columns, channels).transpose(1, 2),
                weight=torch.randn(channels, width), bias=torch.randn(channels))


def check_conv_update(ops):
    for size, columns, width, activation in ((1, 3, 4, "silu"), (3, 5, 3, None), (2, 1, 2, "swish"),
                                             (4, 3, 4, True)):
        d = conv_data(4, size, columns, 7, width)
        slots = ints(5, -1, 0, 3)
        state, x = d["state"].clone(), d["x"].clone()
        given = x.squeeze(2) if size == 1 else x
        out = ops.causal_conv1d_update(given, state, d["weight"], d["bias"], activation,
                                       conv_state_indices=slots)
        expected = d["state"].clone()
        for b, slot in enumerate(slots.tolist()):
            wanted = torch.zeros_like(x[b])
            if slot >= 0:
                wanted, row = conv_row(d["state"][slot], x[b], d["weight"], d["bias"], activation)
                expected[slot] = row[:, row.size(1) - columns:]
            near(out[b].view_as(wanted), wanted, "the output")
        same(state, expected, "the state")
        same(x, d["x"], "x")
    d = conv_data(3, 2, 3, 3)
    plain = ops.causal_conv1d_update(d["x"], d["state"].clone(), d["weight"])
    copied = ops.causal_conv1d_update(d["x"].contiguous(), d["state"].clone(), d["weight"])
    same(plain, copied, "the output of contiguous columns")


def check_conv_ring(ops):
    for size, columns in ((1, 3), (3, 6), (2, 4)):
        d = conv_data(3, size, columns, 5)
        slots, position = ints(4, -1, 1), ints(7, 2, 1022)
        state = d["state"].clone()
        out = ops.causal_conv1d_update(d["x"], state, d["weight"], None, "silu",
                                       cache_seqlens=position, conv_state_indices=slots)
        expected = d["state"].clone()
        for b, slot in enumerate(slots.tolist()):
            wanted = torch.zeros_like(d["x"][b])
            if slot >= 0:
                first = int(position[b])
                order = [(first + i) % columns for i in range(columns)]
                wanted, _ = conv_row(d["state"][slot][:, order], d["x"][b], d["weight"], None, True)
                for t in range(size):
                    expected[slot][:, (first + t) % columns] = d["x"][b][:, t]
            near(out[b], wanted, "the output of a ring")
        same(state, expected, "the ring")
    d = conv_data(2, 1, 3, 3)
    state = d["state"].clone()
    ops.causal_conv1d_update(d["x"], state, d["weight"], cache_seqlens=ints(1, 2),
                             conv_state_indices=ints(-1, -1))
    same(state, d["state"], "the rings of a batch of padding")


def check_conv_fn(ops):
    d = conv_data(3, 5, 3, 3)
    for initial in (None, d["state"]):
        final = torch.full_like(d["state"], 7)
        out, last = ops.causal_conv1d_fn(d["x"], d["weight"], d["bias"], initial_states=initial,
                                         return_final_states=True, final_states_out=final,
                                         activation="silu")
        for b in range(3):
            before = torch.zeros(6, 3) if initial is None else initial[b]
            wanted, row = conv_row(before, d["x"][b], d["weight"], d["bias"], True)
            near(out[b], wanted, "the output")
            same(last[b], row[:, -3:], "the final state")
        if last is not final:
            raise Difference("final_states_out is not what is returned")
    segments = torch.tensor([[0, 0, 1, 1, 1], [4, -1, -1, -1, -1], [2, 2, 2, 2, 3]])
    out = ops.causal_conv1d_fn(d["x"], d["weight"], seq_idx=segments.int())
    for b in range(3):
        for number in segments[b].unique().tolist():
            here = segments[b] == number
            x = d["x"][b][:, here]
            wanted, _ = conv_row(torch.zeros(6, 3), x, d["weight"], None, False)
            near(out[b][:, here], wanted if number >= 0 else wanted * 0, "a segment's output")


def check_conv_servers(ops):
    # vLLM's step of packed rows that were partly accepted; slot 0 is nobody's.
    width, lengths, accepted, slots = 4, [2, 1, 0, 3], [1, 3, 2, 2], [3, 0, 2, 5]
    d = conv_data(1, 6, width - 1 + 3, 6, width)
    x, starts = d["x"][0].t().contiguous(), ints(0, 2, 3, 3, 6)
    state, target = d["state"].clone(), torch.full_like(x, 7)
    out = ops.vllm.causal_conv1d_update(x, state, d["weight"], d["bias"], "silu", ints(*slots),
                                        ints(*accepted), starts, 3, out=target)
    expected = d["state"].clone()
    for b, (slot, taken) in enumerate(zip(slots, accepted)):
        row_x = x[starts[b]:starts[b + 1]].t()
        wanted = torch.zeros_like(row_x)
        if slot > 0 and lengths[b]:
            history = d["state"][slot][:, taken - 1:taken + width - 2]
            wanted, row = conv_row(history, row_x, d["weight"], d["bias"], True)
            expected[slot][:, :row.size(1) - 1] = row[:, 1:]
        near(out[starts[b]:starts[b + 1]].t(), wanted, "vLLM's output")
    same(state, expected, "vLLM's state")
    if out is not target:
        raise Difference("out is not what is returned")

    # Both servers' prefill: x [D, T], a wide pool of which W - 1 columns are a history.
    for server, nobody in ((ops.vllm, 0), (ops.sglang, -1)):
        for resumes in (None, torch.tensor([True, False, True, True])):
            state, more = d["state"].clone(), {}
            slots = ints(3, 1, nobody, 5, 2)  # one more than there are rows
            if resumes is not None:
                more["has_initial_state"] = resumes
            out = server.causal_conv1d_fn(d["x"][0], d["weight"], d["bias"], conv_states=state,
                                          query_start_loc=starts, cache_indices=slots, **more)
            expected = d["state"].clone()
            for b, slot in enumerate(slots[:4].tolist()):
                row_x = d["x"][0][:, starts[b]:starts[b + 1]]
                wanted = torch.zeros_like(row_x)
                if slot != nobody:
                    before = torch.zeros(6, width - 1)
                    if resumes is not None and resumes[b]:
                        before = d["state"][slot][:, :width - 1]
                    if row_x.size(1):
                        wanted, row = conv_row(before, row_x, d["weight"], d["bias"], True)
                        before = row[:, 1 - width:]
                    expected[slot][:, :width - 1] = before
                near(out[:, starts[b]:starts[b + 1]], wanted, "a server's prefill")
            same(state, expected, "a server's state")

    # SGLang's verification keeps the history after every token.
    d = conv_data(3, 2, 3, 5)
    state, windows = d["state"].clone(), torch.full((4, 3, 6, 3), 7.0)
    out = ops.sglang.causal_conv1d_update(
        d["x"], state, d["weight"], conv_state_indices=ints(4, -1, 2),
        intermediate_conv_window=windows, intermediate_state_indices=ints(1, 3, 0))
    expected, kept = d["state"].clone(), torch.full_like(windows, 7)
    for b, (slot, own) in enumerate(((4, 1), (-1, 3), (2, 0))):
        wanted = torch.zeros_like(d["x"][b])
        if slot >= 0:
            wanted, row = conv_row(d["state"][slot], d["x"][b], d["weight"], None, False)
            kept[own, 0], kept[own, 1] = row[:, 1:4], row[:, 2:5]
            expected[slot] = row[:, 2:5]
        near(out[b], wanted, "SGLang's output")
    same(state, expected, "SGLang's state")
    same(windows, kept, "SGLang's windows")


# --- The state-space model ------------------------------------------------------------------------


def step(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    """One token: state [H, P, N], x [H, P], A [H, P, N], B and C [G, N]. Output and new state."""
    H = state.size(0)
    B, C = (one.repeat_interleave(H // one.size(0), 0)[:, None] for one in (B, C))
    dt = dt + (0 if dt_bias is None else dt_bias)
    dt = (F.softplus(dt) if dt_softplus else dt)[..., None]
    state = state * torch.exp(A * dt) + dt * B * x[..., None]
    out = (state * C).sum(-1) + (0 if D is None else D * x)
    return (out if z is None else out * F.silu(z)), state


def ssm_data(tokens, slots, H=4, P=3, G=2, N=5):
    """Tokens, weights, and a pool of states."""
    data = dict(x=torch.randn(tokens, H, P), dt=torch.randn(tokens, H, P),
                B=torch.randn(tokens, G, N), C=torch.randn(tokens, G, N),
                z=torch.randn(tokens, H, P))
    weights = dict(A=-torch.rand(H, P, N), D=torch.randn(H, P), dt_bias=torch.randn(H, P),
                   dt_softplus=True)
    return data, weights, torch.randn(slots, H, P, N)


def token(data, t):
    return {name: one[t] for name, one in data.items()}


def check_ssm(ops):
    data, weights, pool = ssm_data(3, 5)
    state, slots = pool.clone(), ints(4, -1, 2)
    out = ops.selective_state_update(state, **data, **weights, state_batch_indices=slots)
    expected = pool.clone()
    for b, slot in enumerate(slots.tolist()):
        wanted = torch.zeros(4, 3)
        if slot >= 0:
            wanted, expected[slot] = step(pool[slot], **token(data, b), **weights)
        near(out[b], wanted, "the output")
    near(state, expected, "the state")

    # Without heads, and without what is optional.
    data, weights, pool = ssm_data(2, 2, H=1, G=1)
    state = pool.clone()
    flat = {name: one.squeeze(1) for name, one in data.items() if name != "z"}
    out = ops.selective_state_update(state.squeeze(1), A=weights["A"].squeeze(0), **flat)
    for b in range(2):
        here = token({name: data[name] for name in flat}, b)
        wanted, after = step(pool[b], A=weights["A"], **here)
        near(out[b], wanted.squeeze(0), "the output without heads")
        near(state[b], after, "the state without heads")

    # One number per head, repeated by stride 0 or given as such.
    data, weights, pool = ssm_data(2, 2)
    tied = {"A": weights["A"][:, 0, 0], "D": weights["D"][:, 0],
            "dt_bias": weights["dt_bias"][:, 0]}
    wide = {"A": tied["A"][:, None, None].expand(4, 3, 5), "D": tied["D"][:, None].expand(4, 3),
            "dt_bias": tied["dt_bias"][:, None].expand(4, 3)}
    dt = data.pop("dt")[..., 0]
    one = ops.selective_state_update(pool.clone(), dt=dt, **data, **tied)
    two = ops.selective_state_update(pool.clone(), dt=dt[..., None].expand(2, 4, 3), **data, **wide)
    same(one, two, "the output of tied heads")


def scan_row(data, A, D, dt_bias, limit, state):
    """Outputs [S, H, P] of a row and the state after it."""
    outs = []
    for t in range(data["x"].size(0)):
        here = token(data, t)
        here["dt"] = F.softplus(here["dt"] + dt_bias).clamp(*limit)[:, None].expand(4, 3)
        out, state = step(state, **here, A=A[:, None, None], D=D)
        outs.append(out)
    return torch.stack(outs) if outs else data["x"], state


def check_ssm_scan(ops):
    data, weights, pool = ssm_data(14, 4)
    data["dt"] = data["dt"][..., 0]
    A, D, bias = weights["A"][:, 0, 0], weights["D"], weights["dt_bias"][:, 0]
    for B, limit in ((2, (0.0, float("inf"))), (1, (0.4, 1.1))):
        given = {name: one.unflatten(0, (B, -1)) for name, one in data.items()}
        for initial in (None, pool[:B]):
            out, final = ops.mamba_chunk_scan_combined(
                **given, A=A, chunk_size=4, D=D, dt_bias=bias, initial_states=initial,
                dt_softplus=True, dt_limit=limit, return_final_states=True)
            for b in range(B):
                before = torch.zeros(4, 3, 5) if initial is None else initial[b]
                row = {name: one[b] for name, one in given.items()}
                wanted, last = scan_row(row, A, D, bias, limit, before)
                near(out[b], wanted, "the output")
                near(final[b], last, "the state")

    # Packed sequences, with the states after each and without.
    given = {name: one[None] for name, one in data.items()}
    starts = [0, 3, 4, 11, 14]
    segments = torch.repeat_interleave(torch.arange(4), torch.tensor(starts).diff())[None].int()
    more = dict(A=A, chunk_size=8, D=D, dt_bias=bias, seq_idx=segments, dt_softplus=True)
    out, states = ops.mamba_chunk_scan_combined(**given, **more, cu_seqlens=ints(*starts),
                                                return_varlen_states=True)
    for n in range(4):
        row = {name: one[starts[n]:starts[n + 1]] for name, one in data.items()}
        wanted, last = scan_row(row, A, D, bias, (0.0, None), torch.zeros(4, 3, 5))
        near(out[0, starts[n]:starts[n + 1]], wanted, "a sequence's output")
        near(states[n], last, "a sequence's state")
    same(ops.mamba_chunk_scan_combined(**given, **more), out, "the output without states")
    raises(NotImplementedError, "initial_states",
           lambda: ops.mamba_chunk_scan_combined(**given, **more, initial_states=pool[:1]))
    raises(ValueError, "cu_seqlens",
           lambda: ops.mamba_chunk_scan_combined(**given, **more, return_varlen_states=True))


def check_ssm_vllm(ops):
    data, weights, pool = ssm_data(6, 20)
    z = data.pop("z")
    lengths, accepted, starts = [3, 1, 2], [0, 3, 2], ints(0, 3, 4, 6)
    source, target = torch.zeros(3, 3, dtype=torch.int32), torch.zeros(3, 3, dtype=torch.int32)
    first, expected, wanted = [5, 0, 2], pool.clone(), torch.zeros_like(z)
    for b in range(3):
        source[b, max(accepted[b] - 1, 0)] = first[b]
        state = pool[first[b]]
        for i in range(lengths[b]):
            target[b, i], t = 8 + 3 * b + i, int(starts[b]) + i
            if first[b]:  # slot 0 is nobody's
                wanted[t], state = step(state, **token(data, t), z=z[t], **weights)
                expected[8 + 3 * b + i] = state
    state, out = pool.clone(), torch.full_like(z, 7)
    D, dt_bias, A = (weights[name] for name in ("D", "dt_bias", "A"))
    ops.vllm.selective_state_update(
        state, data["x"], data["dt"], A, data["B"], data["C"], D, dt_bias, z, True,
        state_batch_indices=source, dst_state_batch_indices=target, out=out,
        num_accepted_tokens=torch.tensor(accepted), cu_seqlens=starts)
    near(out, wanted, "vLLM's output")
    near(state, expected, "vLLM's states")

    # A table without counts is a list: its first column.
    lists, tables = pool.clone(), pool.clone()
    for state, slots in ((lists, ints(5, 0, 2)), (tables, ints(5, 9, 0, 9, 2, 9).view(3, 2))):
        ops.vllm.selective_state_update(state, D=D, dt_bias=dt_bias, A=A, **data,
                                        state_batch_indices=slots, cu_seqlens=ints(0, 2, 4, 6))
    same(tables, lists, "the states of a table without counts")


def check_ssm_prompts(ops):
    """Prompts of Mamba1 are steps of selective_state_update, one after the other."""
    D, N, starts, slots = 6, 5, [0, 3, 4, 4, 8], [5, 0, 3, 2]
    x, dt, z = (torch.randn(8, D) for _ in range(3))
    B, C, A, skip, bias = torch.randn(8, N), torch.randn(8, N), -torch.rand(D, N), torch.randn(D), torch.randn(D)
    pool, resumes = torch.randn(7, D, N), torch.tensor([True, True, False, False])
    expected, wanted = pool.clone(), torch.zeros(8, D)
    for row, slot in enumerate(slots):
        if slot and not resumes[row]:
            expected[slot] = 0
        for t in range(starts[row], starts[row + 1]):
            here = slice(t, t + 1)
            wanted[here] = ops.vllm.selective_state_update(
                expected, x[here], dt[here], A, B[here], C[here], skip, bias, z[here], True, ints(slot))
    state, given = pool.clone(), dict(A=A, D=skip, delta_bias=bias, delta_softplus=True)
    out = ops.vllm.selective_scan_fn(
        x.t(), state, dt.t(), B=B.t()[None], C=C.t(), z=z.t().contiguous(), **given,
        query_start_loc=ints(*starts), cache_indices=ints(*slots), has_initial_state=resumes)
    near(out.t(), wanted, "the prompts' outputs")
    near(state, expected, "the states after prompts")
    batch = {name: one.unflatten(0, (2, 4)).transpose(1, 2)
             for name, one in dict(u=x, delta=dt, B=B, C=C, z=z).items()}
    out, last = ops.selective_scan_fn(**batch, **given, return_last_state=True)
    state = torch.full((2, D, N), torch.nan)
    same(ops.vllm.selective_scan_fn(ssm_states=state, **batch, **given), out, "the batch's outputs")
    same(state, last, "the batch's states")
    state = torch.zeros(2, D, N)
    for t in range(4):
        step = ops.selective_state_update(state, x[t::4], dt[t::4], A, B[t::4], C[t::4], skip, z[t::4], bias, True)
        near(out[:, :, t], step, "the batch's output")
    near(last, state, "the batch's last states")
    raises(NotImplementedError, "initial_state_idx", lambda: ops.vllm.selective_scan_fn(
        ssm_states=state, **batch, **given, initial_state_idx=ints(0)))
    raises(ValueError, "of one group", lambda: ops.selective_scan_fn(
        **batch | dict(B=batch["B"][:, None].repeat(1, 2, 1, 1)), **given))


def ring_data(slots, L, H=4, P=3, G=2, N=5):
    return dict(x_cache=torch.full((slots, H, L, P), torch.nan),
                dt_cache=torch.full((slots, H, L), torch.nan),
                B_cache=torch.full((slots, G, L, N), torch.nan), max_cache_len=L)


def check_ssm_replay_vllm(ops):
    """Rows whose states lag: outputs of each step, and the state where it is written, are those of
    the recurrence, whatever lies behind the entries that were written."""
    L, steps, flushes = 4, 11, (3, 5, 9, 10)  # full, early twice, and at once
    data, weights, pool = ssm_data(3 * steps, 6)
    D, dt_bias, A = (weights[name] for name in ("D", "dt_bias", "A"))
    weights = dict(A=A[:, :1, :1].expand_as(A), D=D[:, :1].expand_as(D),
                   dt_bias=dt_bias[:, :1].expand_as(dt_bias), dt_softplus=True)
    data["dt"] = data["dt"][..., :1].expand_as(data["x"])
    slots, state, rings = ints(4, 0, 2), pool.clone(), ring_data(6, L)
    exact, written = pool.clone(), 0
    for t in range(steps):
        rows = {name: x[3 * t:3 * t + 3] for name, x in data.items()}
        is_flush = torch.full((3,), t in flushes, dtype=torch.int8)
        out = ops.vllm.selective_state_update_replayssm_output_only(
            state, **rows, **weights, **rings, write_pos=ints(*[t - written] * 3),
            is_flush=is_flush, state_batch_indices=slots.view(3, 1), out=torch.empty_like(rows["x"]))
        if t in flushes:
            written = t + 1
        for b, slot in enumerate(slots.tolist()):
            wanted = torch.zeros_like(out[b])
            if slot:
                mine = token({name: x for name, x in rows.items()}, b)
                wanted, exact[slot] = step(exact[slot], **mine, **weights)
            near(out[b], wanted, f"the output of step {t}")
            if t in flushes:
                near(state[slot], exact[slot], f"the state after step {t}")
    bad = dict(rows, dt=rows["dt"] * torch.rand(3))
    call = ops.vllm.selective_state_update_replayssm_output_only
    more = dict(write_pos=ints(0, 0, 0), is_flush=is_flush, state_batch_indices=slots)
    for kind, text, wrong in (
            (ValueError, "dt is expected to be one number per head", dict(bad)),
            (ValueError, "write_pos is expected to be given", dict(write_pos=None)),
            (ValueError, "max_cache_len is expected to be the 4", dict(max_cache_len=16)),
            (NotImplementedError, "enable_stochastic_rounding is not supported",
             dict(enable_stochastic_rounding=True)),
            (RuntimeError, "ring_B is expected", dict(B_cache=rings["x_cache"])),
            (RuntimeError, "cursors is expected", dict(write_pos=ints(5, 0, 0)))):
        raises(kind, text, lambda wrong=wrong: call(state, **{**rows, **weights, **rings, **more,
                                                             **wrong}))


def check_ssm_sglang(ops):
    data, weights, pool = ssm_data(9, 5)
    slots, own = ints(3, -1, 1), ints(2, 1, 0)
    tree = ints(9, 0, 0, 9, 0, 1, 9, 0, 0).view(3, 3)  # the first token's entry says nothing
    four = {name: one.unflatten(0, (3, 3)) for name, one in data.items()}
    for parents in (None, tree):
        state, buffer = pool.clone(), torch.full((4, 5, 4, 3, 5), 7.0)
        out = ops.sglang.selective_state_update(
            state, **four, **weights, state_batch_indices=slots, disable_state_update=True,
            intermediate_states_buffer=buffer, cache_steps=5, retrieve_parent_token=parents,
            intermediate_state_indices=own)
        kept = torch.full_like(buffer, 7)
        for b in range(3):
            for t in range(3):
                wanted = torch.zeros(4, 3)
                if slots[b] >= 0:
                    before = t - 1 if parents is None else int(parents[b, t])
                    here = pool[int(slots[b])] if t == 0 else kept[int(own[b]), before]
                    wanted, kept[int(own[b]), t] = step(here, **token(data, 3 * b + t), **weights)
                near(out[b, t], wanted, "SGLang's output")
        same(state, pool, "the states of a verification")
        near(buffer, kept, "SGLang's buffer")
        if parents is None:
            last = kept[2, 2]
    state = pool.clone()
    ops.sglang.selective_state_update(state, **four, **weights, state_batch_indices=slots)
    near(state[3], last, "SGLang's state after its tokens")


# --- The gated delta rule -------------------------------------------------------------------------


def delta_row(q, k, v, g, beta, state, scale=None, normalise=False):
    """Outputs [T, HV, V] and the states after every token [T, HV, V, K] of one row."""
    HV = v.size(1)
    if normalise:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HV // x.size(1), 1) for x in (q, k))
    scale = k.size(-1) ** -0.5 if scale is None else scale
    outs, states = [], []
    for t in range(v.size(0)):
        state = state * g[t].exp()[:, None, None]
        error = v[t] - (state * k[t][:, None]).sum(-1)
        state = state + (beta[t][:, None] * error)[..., None] * k[t][:, None]
        outs.append((state * (q[t] * scale)[:, None]).sum(-1))
        states.append(state)
    return torch.stack(outs), torch.stack(states)


def delta_data(B, T, H=2, HV=4, K=5, V=3):
    return dict(q=torch.randn(B, T, H, K), k=torch.randn(B, T, H, K) / 3,
                v=torch.randn(B, T, HV, V), g=-torch.rand(B, T, HV), beta=torch.rand(B, T, HV))


def check_delta_fla(ops):
    for name in ("fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule"):
        call = getattr(ops, name)
        for T, v_first, starts, normalise in ((1, False, None, False), (4, True, None, True),
                                              (6, False, [0, 2, 6], False)):
            d = delta_data(1 if starts else 2, T)
            before = torch.randn(2, 4, 3, 5)
            given = before if v_first else before.transpose(-1, -2).contiguous()
            held = given.clone()
            out, final = call(**d, scale=0.3, initial_state=given, output_final_state=True,
                              use_qk_l2norm_in_kernel=normalise, state_v_first=v_first,
                              cu_seqlens=None if starts is None else torch.tensor(starts))
            same(given, held, f"{name}: the initial state")
            for n in range(2):
                row = (0, slice(*starts[n:n + 2])) if starts else (n, slice(None))
                wanted, states = delta_row(**{key: x[row] for key, x in d.items()}, state=before[n],
                                           scale=0.3, normalise=normalise)
                near(out[row], wanted, f"{name}: the output")
                last = states[-1] if v_first else states[-1].transpose(-1, -2)
                near(final[n], last, f"{name}: the final state")
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            earlier = call(**d, initial_state=held.transpose(-1, -2).contiguous(),
                           cu_seqlens=torch.tensor(starts), transpose_state_layout=True)
        if [warning.category for warning in warned] != [DeprecationWarning]:
            raise Difference(f"{name} does not warn of an earlier name")
        same(earlier[0], call(**d, initial_state=held, cu_seqlens=torch.tensor(starts))[0],
             f"{name}: the output by an earlier name")
        d = delta_data(2, 3)
        out, final = call(**d)
        if final is not None:
            raise Difference(f"{name} returns a state that nobody asked for")
        zero = call(**d, initial_state=torch.zeros(2, 4, 5, 3), output_final_state=True)
        near(out, zero[0], f"{name}: the output without a state")
        near(call(**d, output_final_state=True)[1], zero[1], f"{name}: the state out of nothing")

        # Gates that the call makes are gates that the caller makes.
        raw = {**d, "g": torch.randn(2, 3, 4), "beta": torch.randn(2, 3, 4)}
        A_log, dt_bias = torch.randn(4), torch.randn(4)
        g = -A_log.exp() * F.softplus(raw["g"] + dt_bias)
        sigmoid = {"use_beta_sigmoid_in_kernel": True}
        gate = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias}
        for more, made in (({**gate, **sigmoid}, (g, raw["beta"].sigmoid())),
                           (gate, (g, raw["beta"])),
                           (sigmoid, (raw["g"], raw["beta"].sigmoid())),
                           ({**sigmoid, "allow_neg_eigval": True},
                            (raw["g"], 2 * raw["beta"].sigmoid())),
                           ({**gate, **sigmoid, "allow_neg_eigval": True},
                            (g, 2 * raw["beta"].sigmoid())),
                           ({**gate, **sigmoid, "dt_bias": None},
                            (-A_log.exp() * F.softplus(raw["g"]), raw["beta"].sigmoid()))):
            found = call(**raw, **more)[0]
            near(found, call(**{**raw, "g": made[0], "beta": made[1]})[0], f"{name}: {list(more)}")
    mixed = {**d, "v": d["v"].half()}
    out = ops.fused_recurrent_gated_delta_rule(**mixed)[0]
    if out.dtype != torch.float16:
        raise Difference(f"the output of a half v is {out.dtype}")
    plain = {**d, "g": d["g"] * 0, "beta": d["beta"] * 0 + 1}
    near(ops.fused_recurrent_gated_delta_rule(d["q"], d["k"], d["v"])[0],
         ops.fused_recurrent_gated_delta_rule(**plain)[0], "the output without gates")


def check_delta_vllm(ops):
    pool = torch.randn(12, 4, 3, 5)
    d = delta_data(1, 6)
    table = ints(1, 2, 3, 0, 5, 6, 7, 8, 9).view(3, 3)
    starts, accepted = ints(0, 3, 4, 6), ints(2, 1, 3)
    state = pool.clone()
    out, final = ops.vllm.fused_recurrent_gated_delta_rule(
        **d, initial_state=state, cu_seqlens=starts, ssm_state_indices=table,
        num_accepted_tokens=accepted)
    expected, wanted = pool.clone(), torch.zeros_like(d["v"])
    for n in range(3):
        row = slice(int(starts[n]), int(starts[n + 1]))
        slot = int(table[n, accepted[n] - 1])
        if slot > 0:
            wanted[0, row], states = delta_row(**{key: x[0, row] for key, x in d.items()},
                                               state=pool[slot])
            for i, after in enumerate(states):
                expected[int(table[n, i])] = after
    near(out, wanted, "vLLM's output")
    near(state, expected, "vLLM's states")
    if final is not state:
        raise Difference("the pool is not what is returned")

    d = delta_data(3, 2)
    state = pool[:3].clone()
    out, states = ops.vllm.fused_recurrent_gated_delta_rule(**d, initial_state=state,
                                                            inplace_final_state=False)
    for n in range(3):
        wanted, after = delta_row(**token(d, n), state=pool[n])
        near(out[n], wanted, "the output beside states of every token")
        near(states[2 * n:2 * n + 2], after, "the states of every token")
    same(state, pool[:3], "a pool that is only read")

    # One token per row: gates inside, heads packed, and both of them beside gates outside.
    H, HV, K, V = 2, 4, 5, 3
    qkv, a, b = torch.randn(4, 2 * H * K + HV * V + 7), torch.randn(4, HV), torch.randn(4, HV)
    A_log, dt_bias, slots = torch.randn(HV), torch.randn(HV), ints(3, 0, -1, 7)
    mixed = qkv[:, :2 * H * K + HV * V]
    q, k, v = mixed.split([H * K, H * K, HV * V], 1)
    q, k, v = q.reshape(4, 1, H, K), k.reshape(4, 1, H, K), v.reshape(4, 1, HV, V)
    g = (-A_log.exp() * F.softplus(a + dt_bias))[:, None]
    outside, inside, packed = pool.clone(), pool.clone(), pool.clone()
    out = torch.full((4, 1, HV, V), 7.0)
    wanted, _ = ops.vllm.fused_recurrent_gated_delta_rule(
        q, k, v, g, b.sigmoid()[:, None], 0.4, outside, ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True)
    found, _ = ops.vllm.fused_sigmoid_gating_delta_rule_update(
        A_log, a, b, dt_bias, q, k, v, scale=0.4, initial_state=inside, ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True)
    ops.vllm.fused_recurrent_gated_delta_rule_packed_decode(
        mixed, a, b, A_log, dt_bias, 0.4, packed, out, slots, True)
    near(found, wanted, "the output of gates inside")
    same(out, found, "the output of packed heads")
    near(inside, outside, "the states of gates inside")
    same(packed, inside, "the states of packed heads")
    if bool(outside[7].eq(pool[7]).all()) or not torch.equal(outside[0], pool[0]):
        raise Difference("slot 7 is written, slot 0 is not")


def check_delta_sglang(ops):
    pool, d = torch.randn(6, 4, 3, 5), delta_data(1, 6)
    slots, own, starts = ints(4, -1, 2), ints(1, 0, 2), ints(0, 2, 4, 6)
    state, buffer = pool.clone(), torch.full((3, 2, 4, 3, 5), 7.0)
    out = ops.sglang.fused_recurrent_gated_delta_rule_update(
        **d, initial_state_source=state, initial_state_indices=slots, cu_seqlens=starts,
        disable_state_update=True, intermediate_states_buffer=buffer, cache_steps=2,
        intermediate_state_indices=own)
    kept, wanted = torch.full_like(buffer, 7), torch.zeros_like(d["v"])
    for n in range(3):
        row = slice(2 * n, 2 * n + 2)
        if slots[n] >= 0:
            wanted[0, row], kept[int(own[n])] = delta_row(
                **{key: x[0, row] for key, x in d.items()}, state=pool[int(slots[n])])
    near(out, wanted, "SGLang's output")
    near(buffer, kept, "SGLang's buffer")
    same(state, pool, "the states of a verification")


# --- What every function keeps --------------------------------------------------------------------


def check_delta_replay_sglang(ops):
    """As check_ssm_replay_vllm: a ring of 3, flushed where it is full and once before."""
    H, HV, K, V, L, slots = 2, 4, 5, 3, 3, ints(4, -1, 2)
    pool = torch.randn(6, HV, V, K)
    A_log, dt_bias = torch.randn(HV), torch.randn(HV)
    rings = dict(d_cache=torch.full((6, HV, L, V), torch.nan),
                 k_cache=torch.full((6, H, L, K), torch.nan),
                 g_cache=torch.full((6, HV, L), torch.nan))
    call = ops.sglang.fused_recurrent_linear_replayssm_decode
    state, exact, cursor = pool.clone(), pool.clone(), 0
    for t in range(9):
        mixed, a, b = torch.randn(3, 2 * H * K + HV * V), torch.randn(3, HV), torch.randn(3, HV)
        given = dict(mixed_qkv=mixed, a=a, b=b, A_log=A_log, dt_bias=dt_bias, scale=K**-0.5,
                     initial_state=state, out=torch.empty(3, 1, HV, V), ssm_state_indices=slots,
                     write_pos=ints(*[cursor] * 3), use_qk_l2norm_in_kernel=True, **rings)
        force = ints(*[int(t == 4)] * 3) if t > 1 else None
        out, same_pool = call(**given, force_flush=force)
        if same_pool is not state:
            raise Difference("the pool is another one")
        q, k, v = (x.unflatten(1, (-1, size)) for x, size in zip(
            mixed.split([H * K, H * K, HV * V], 1), (K, K, V)))
        g = -A_log.exp() * F.softplus(a + dt_bias)
        for row, slot in enumerate(slots.tolist()):
            wanted = torch.zeros(1, HV, V)
            if slot >= 0:
                wanted, states = delta_row(*(x[row:row + 1] for x in (q, k, v, g, b.sigmoid())),
                                           exact[slot], normalise=True)
                exact[slot] = states[-1]
            near(out[row], wanted, f"the output of step {t}")
            if slot >= 0 and (t == 4 or cursor == L - 1):
                near(state[slot], exact[slot], f"the state after step {t}")
        cursor = 0 if t == 4 else (cursor + 1) % L
    for kind, text, wrong in (
            (NotImplementedError, "is_kda is not supported", dict(is_kda=True)),
            (ValueError, "mixed_qkv is expected to be", dict(mixed_qkv=mixed[:, :-1])),
            (RuntimeError, "ring_u is expected", dict(d_cache=rings["d_cache"][:, :2])),
            (RuntimeError, "cursors is expected", dict(write_pos=ints(3, 0, 0)))):
        raises(kind, text, lambda wrong=wrong: call(**{**given, **wrong}))


def check_signatures(ops):
    for name, expected in PARAMETERS.items():
        function = ops
        for part in name.split("."):
            function = getattr(function, part)
        found = list(inspect.signature(function).parameters)
        if found != expected.split():
            raise Difference(f"{name} takes {found}")


def check_refusals(ops):
    d = delta_data(1, 2)
    c = conv_data(2, 2, 3, 3)
    data, weights, pool = ssm_data(2, 2)
    recurrent, update = ops.fused_recurrent_gated_delta_rule, ops.sglang.causal_conv1d_update
    for text, call in (
            ("gk is not supported", lambda: recurrent(**d, gk=d["q"])),
            ("head_first is not supported", lambda: recurrent(**d, head_first=True)),
            ("cp_context is not", lambda: ops.chunk_gated_delta_rule(**d, cp_context=1)),
            ("activation is expected", lambda: ops.causal_conv1d_fn(c["x"], c["weight"],
                                                                    activation="gelu")),
            ("initial_states is not supported", lambda: ops.causal_conv1d_fn(
                c["x"], c["weight"], seq_idx=ints(0, 0, 0, 0).view(2, 2),
                initial_states=c["state"])),
            ("retrieve_next_token is not", lambda: update(c["x"], c["state"], c["weight"],
                                                          retrieve_next_token=ints(0))),
            ("block_table is not", lambda: ops.sglang.causal_conv1d_fn(
                c["x"][0], c["weight"], None, None, ints(0, 2), block_table=ints(0))),
            ("enable_stochastic_rounding is not", lambda: ops.vllm.selective_state_update(
                pool, **data, **weights, enable_stochastic_rounding=True))):
        raises(NotImplementedError, text, call)
    for text, call in (
            ("q is expected to be [1, T, H, K]", lambda: recurrent(
                **delta_data(2, 2), cu_seqlens=ints(0, 2))),
            ("allow_neg_eigval needs", lambda: recurrent(**d, allow_neg_eigval=True)),
            ("A_log is expected", lambda: recurrent(**d, use_gate_in_kernel=True)),
            ("disable_state_update", lambda: ops.sglang.selective_state_update(
                pool, **data, **weights, intermediate_states_buffer=pool[:, None])),
            ("out is expected", lambda: ops.vllm.selective_state_update(
                pool, **data, **weights, out=torch.empty(1))),
            ("softplus_beta", lambda: ops.sglang.fused_sigmoid_gating_delta_rule_update(
                None, d["g"], None, 2.0, 20.0, d["q"], d["k"], d["v"], d["g"], None, None)),
            ("of integers; got torch.float32", lambda: recurrent(
                **d, cu_seqlens=torch.tensor([0.0, 2.0]))),
            ("within 32 bits; got [4294967296]", lambda: ops.selective_state_update(
                pool, **ssm_data(1, 1)[0], **weights,
                state_batch_indices=torch.tensor([1 << 32])))):
        raises(ValueError, text, call)
    raises(RuntimeError, "conv_state is expected", lambda: ops.causal_conv1d_update(
        c["x"], c["state"][:, :5], c["weight"]))


def check_gradients(ops):
    d = {name: x.requires_grad_() for name, x in delta_data(1, 2).items()}
    out, final = ops.fused_recurrent_gated_delta_rule(**d, output_final_state=True)
    for result in (out, final):
        raises(NotImplementedError, "has no gradient", result.sum().backward)
    c = conv_data(2, 2, 3, 3)
    out, _ = ops.causal_conv1d_fn(c["x"].requires_grad_(), c["weight"], return_final_states=True)
    out += 1
    raises(NotImplementedError, "has no gradient", out.sum().backward)
    c = conv_data(2, 2, 3, 3)
    out = ops.causal_conv1d_update(c["x"], c["state"], c["weight"].requires_grad_())
    raises(NotImplementedError, "has no gradient", out.sum().backward)
    with torch.no_grad():
        if ops.causal_conv1d_update(c["x"], c["state"], c["weight"]).requires_grad:
            raise Difference("a result under no_grad requires a gradient")


def check_views(ops):
    """Layouts that servers keep are read and returned without a copy."""
    conv = importlib.import_module(ops.__name__ + "._conv")
    x = torch.randn(3, 2, 6).transpose(1, 2)
    tokens, _ = conv.tokens_of(x)
    out = conv.shaped_like(x, tokens)
    if tokens.data_ptr() != x.data_ptr() or out.stride() != x.stride():
        raise Difference("tokens of neighbouring channels are copied")
    delta = importlib.import_module(ops.__name__ + "._delta_rule")
    d = delta_data(2, 3)
    tokens = delta.Tokens(**d, starts=None)
    for name in ("q", "k", "v", "g", "beta"):
        if getattr(tokens, name).data_ptr() != d[name].data_ptr():
            raise Difference(f"{name} is copied")


def check_empty(ops):
    """A rank without a request calls them with no row, and a row may have no token."""
    slots, buffer = ints(), torch.zeros(2, 2, 4, 3, 5)
    verified = {"disable_state_update": True, "intermediate_states_buffer": buffer}
    d = delta_data(1, 0)
    ops.sglang.fused_recurrent_gated_delta_rule_update(
        **d, initial_state_source=buffer[0], initial_state_indices=slots, cu_seqlens=ints(0),
        **verified)
    c = conv_data(0, 2, 3, 3)
    ops.sglang.causal_conv1d_update(c["x"], c["state"], c["weight"], conv_state_indices=slots,
                                    intermediate_conv_window=torch.zeros(2, 2, 6, 3))
    for run in (ops.fused_recurrent_gated_delta_rule, ops.chunk_gated_delta_rule):
        _, final = run(**delta_data(2, 0), output_final_state=True)
        same(final, torch.zeros_like(final), "the state after no token")


def check_compile(ops):
    c = conv_data(2, 1, 3, 3)

    def run(x, state, weight, slots):
        out = ops.causal_conv1d_update(x, state, weight, None, "silu", conv_state_indices=slots)
        return out * 2

    states = [c["state"].clone(), c["state"].clone()]
    slots = ints(2, -1)
    direct = run(c["x"], states[0], c["weight"], slots)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    same(compiled(c["x"], states[1], c["weight"], slots), direct, "the compiled output")
    same(states[1], states[0], "the compiled state")


def check_library(ops, library):
    """Which library is loaded: it says which PyTorch it is for, and another one is refused."""
    finder = importlib.import_module(ops.__name__ + "._library")
    version = finder.built_for(library)
    if torch.__version__.split("+")[0] != ".".join(map(str, version)):
        raise Difference(f"the library says it is for PyTorch {version}")
    finder.check(library, torch.__version__)
    raises(ImportError, "and this is PyTorch 2.3.1", lambda: finder.check(library, "2.3.1+cu121"))
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / finder.NAME
        empty.write_bytes(b"\x7fELF")
        raises(ImportError, "does not say which PyTorch", lambda: finder.check(empty, "2.11.0"))
        before = os.environ[finder.VARIABLE]
        os.environ[finder.VARIABLE] = str(Path(folder) / "none.so")
        raises(ImportError, "found no liblockstep_torch.so", finder.find)
        os.environ[finder.VARIABLE] = before
    folder = Path(ops.__file__).parents[len(ops.__name__.split("."))]
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); import {ops.__name__}"
    without = subprocess.run([sys.executable, "-I", "-S", "-c", code], stderr=subprocess.PIPE,
                             text=True)  # sees no installed packages
    if "ImportError: lockstep.ops needs PyTorch" not in without.stderr:
        raise Difference(f"without PyTorch it says {without.stderr[-200:]!r}")


CHECKS = {
    "signatures": check_signatures,
    "causal_conv1d_update": check_conv_update,
    "causal_conv1d_update with cache_seqlens": check_conv_ring,
    "causal_conv1d_fn": check_conv_fn,
    "the servers' convolutions": check_conv_servers,
    "selective_state_update": check_ssm,
    "mamba_chunk_scan_combined": check_ssm_scan,
    "vllm.selective_state_update": check_ssm_vllm,
    "vllm.selective_state_update_replayssm_output_only": check_ssm_replay_vllm,
    "selective_scan_fn": check_ssm_prompts,
    "sglang.selective_state_update": check_ssm_sglang,
    "FLA's gated delta rule": check_delta_fla,
    "vLLM's gated delta rule": check_delta_vllm,
    "SGLang's gated delta rule": check_delta_sglang,
    "SGLang's replay of the gated delta rule": check_delta_replay_sglang,
    "refusals": check_refusals,
    "gradients": check_gradients,
    "views": check_views,
    "no rows and no tokens": check_empty,
    "torch.compile": check_compile,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", help="liblockstep_torch.so")
    parser.add_argument("--ops", help="a module instead of that of this source tree: lockstep.ops")
    arguments = parser.parse_args()
    os.environ["LOCKSTEP_TORCH_OPS"] = arguments.library
    if not arguments.ops:
        sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "kernels" / "torch"))
    ops = importlib.import_module(arguments.ops or "ops")
    for name, check in CHECKS.items():
        torch.manual_seed(1)
        try:
            check(ops)
        except Difference as difference:
            raise Difference(f"{name}: {difference}") from difference
        print(f"cpu   {name}: ok", flush=True)
    check_library(ops, arguments.library)
    print("cpu   the library and its PyTorch: ok", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Difference as difference:
        sys.exit(f"{difference}")

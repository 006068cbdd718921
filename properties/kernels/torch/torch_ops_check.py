#!/usr/bin/env python3
# ctest: name=operators.check_under_python labels=quick timeout=600 skip=77 python=torch args="{lockstep_torch_ops} --device cpu --backend aot_eager"
"""The operators torch.ops.lockstep.* under Python: opcheck, torch.compile and CUDA graphs.

    properties/kernels/torch/torch_ops_check.py build/cuda/liblockstep_torch.so

Of each operator, on the CPU and on the GPU where there is one:

  opcheck   torch.library.opcheck: schema, fake tensors, autograd, ahead-of-time tracing
  compile   torch.compile(fullgraph=True) gives the bits that the call itself gives (the first and
            last case through Inductor, where it has a compiler; the others by aot_eager, and those
            that give no tensor to write: Inductor of PyTorch 2.11 cannot lower these)
  cpu       the GPU's results are near the reference's: with arguments swapped they would not be
  graph     a captured CUDA graph, replayed with other contents, gives the bits of a direct call
  refusals  a tensor that is longer by one, of one dimension more or of integers of 64 bits is refused
            with a sentence, and nothing was written: but for what FREE lists
  rows      a batch of more rows than a launch takes gives what its rows give alone

One line per operator and device, and one for the README's example; the first difference ends the
run with status 1.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch

SLOTS = 12
ROWS = 4
STARTS = [0, 2, 3, 5, 8]  # rows of 2, 1, 2 and 3 tokens
TOKENS = 8


class Difference(Exception):
    """Two results that should agree do not."""


class Data:
    """Test data of one case on one device, a function of the seed."""

    def __init__(self, device, seed):
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(SLOTS, generator=self.generator).tolist()

    def normal(self, *shape, dtype=torch.bfloat16):
        values = torch.randn(shape, generator=self.generator) / 2
        return values.to(dtype).to(self.device)

    def negative(self, *shape, dtype=torch.float32):
        return -self.normal(*shape, dtype=dtype).abs() - 1 / 64

    def ints(self, values):
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def starts(self):
        return self.ints(STARTS)

    def indices(self, count=ROWS):
        """Different slots for rows, one row padding."""
        return self.ints([slot if row != 1 else -1 for row, slot in enumerate(self.order[:count])])

    def table(self):
        return self.ints(self.order).reshape(ROWS, 3)

    def sizes(self, on_gpu, on_cpu):
        """Sizes of a serving model where a kernel is compiled for them, small ones elsewhere."""
        return on_gpu if self.device == "cuda" else on_cpu


def conv(data, **more):
    channels, columns = data.sizes((256, 4), (12, 4))
    wide = columns - 1 + more.pop("extra", 0)
    tokens = more.pop("tokens", TOKENS)
    more.setdefault("state_indices", data.indices())
    return dict(
        x=data.normal(tokens, channels), conv_state=data.normal(SLOTS, channels, wide),
        weight=data.normal(channels, columns), bias=data.normal(channels), activation="silu",
        **more)


def conv_cases(data):
    yield conv(data, tokens=ROWS)
    yield conv(data, query_start_loc=data.starts(), extra=1)
    yield conv(data, query_start_loc=data.starts(), extra=2,
               num_accepted_tokens=data.ints([1, 2, 0, 3]))
    for parents in (None, data.ints([-1, 0, -1, -1, 0, -1, 0, 0])):
        case = conv(data, query_start_loc=data.starts(), parents=parents)
        channels, columns = case["conv_state"].shape[1:]
        yield {**case, "snapshots": data.normal(TOKENS, channels, columns)}


def mamba(data, tokens=TOKENS, state=torch.float32, **more):
    H, P, G, N = data.sizes((8, 64, 2, 128), (4, 3, 2, 5))
    more.setdefault("state_indices", data.indices())
    return dict(
        state=data.normal(SLOTS, H, P, N, dtype=state), x=data.normal(tokens, H, P),
        dt=data.normal(tokens, H), A=data.negative(H), B=data.normal(tokens, G, N),
        C=data.normal(tokens, G, N), D=data.normal(H, dtype=torch.float32),
        z=data.normal(tokens, H, P), dt_bias=data.normal(H, dtype=torch.float32),
        dt_softplus=True, dt_max=1.5, **more)


def mamba_cases(data):
    for state in (torch.float32, torch.bfloat16):
        yield mamba(data, ROWS, state)
        yield mamba(data, state=state, query_start_loc=data.starts(), state_indices=data.table(),
                    num_accepted_tokens=data.ints([1, 3, 0, 2]))
        case = mamba(data, state=state, query_start_loc=data.starts(),
                     parents=data.ints([-1, 0, -1, -1, 0, -1, 0, 0]))
        yield {**case, "snapshots": data.normal(TOKENS, *case["state"].shape[1:], dtype=state)}
        heads = case["x"].shape[1]
        yield mamba(data, state=state, query_start_loc=data.starts(), read_only=True,
                    stash_decay=data.normal(TOKENS, heads, dtype=torch.float32),
                    stash_dt=data.normal(TOKENS, heads, dtype=torch.float32))
    case = mamba(data, ROWS)
    for name in ("x", "dt", "B", "C", "z"):  # the kernel has scaled states beside bfloat16
        if torch.is_tensor(case.get(name)):
            case[name] = case[name].bfloat16()
    numbers = (case["state"] * 64).round().clamp(-127, 127).to(torch.int8)
    scale = data.normal(*numbers.shape[:3], 1, dtype=torch.float32).abs() + 1 / 64
    yield {**case, "state": numbers, "state_scale": scale, "rand_seed": 3}


def conv_prefill_cases(data):
    channels, columns = data.sizes((256, 4), (12, 4))
    rows = dict(state_indices=data.indices(), activation="silu",
                has_initial_state=torch.tensor([True, True, False, True], device=data.device))
    inputs = dict(x=data.normal(TOKENS, channels), weight=data.normal(channels, columns),
                  bias=data.normal(channels), conv_state=data.normal(SLOTS, channels, columns - 1))
    yield {**inputs, "conv_state": None, "query_start_loc": data.starts(), "activation": "none"}
    yield {**inputs, **rows, "x": data.normal(ROWS, 3, channels),
           "context_lengths": data.ints([3, 1, 0, 2])}
    yield {**inputs, **rows, "query_start_loc": data.starts()}


def ssd_cases(data):
    for state in (torch.float32, torch.bfloat16):
        case = mamba(data, state=state, query_start_loc=data.starts())
        resumes = torch.tensor([True, True, False, True], device=data.device)
        yield {**case, "has_initial_state": resumes}
        yield {**case, "boundary_every": 2,
               "boundary_states": data.normal(3, *case["state"].shape[1:], dtype=state)}
        tokens = {name: data.normal(ROWS, 3, *case[name].shape[1:])
                  for name in ("x", "dt", "B", "C", "z")}
        yield {**case, **tokens, "query_start_loc": None,
               "context_lengths": data.ints([3, 1, 0, 2])}
    names = ("state_indices", "dt_max")
    yield {**{name: x for name, x in case.items() if name not in names}, "state": None}


def mamba_replay_cases(data):
    for nodes in (None, data.ints([[0, 1], [0, -1], [1, 0], [2, 0]])):
        case = mamba(data, state=torch.bfloat16)
        heads = case["x"].shape[1]
        yield dict(
            state=case["state"], x=case["x"], B=case["B"], nodes=nodes,
            stash_decay=-data.negative(TOKENS, heads) / 2, stash_dt=-data.negative(TOKENS, heads),
            num_accepted_tokens=data.ints([2, 1, 0, 3]), state_indices=case["state_indices"],
            query_start_loc=data.starts())


def delta(data, tokens=TOKENS, state=torch.float32, **more):
    H, HV, K, V = data.sizes((2, 4, 128, 128), (2, 4, 5, 3))
    more.setdefault("state_indices", data.indices())
    return dict(
        q=data.normal(tokens, H, K), k=data.normal(tokens, H, K), v=data.normal(tokens, HV, V),
        g=data.normal(tokens, HV), beta=data.normal(tokens, HV),
        state=data.normal(SLOTS, HV, V, K, dtype=state), A_log=data.normal(HV, dtype=torch.float32),
        dt_bias=data.normal(HV, dtype=torch.float32), use_qk_l2norm=True, **more)


def delta_cases(data):
    for state in (torch.float32, torch.bfloat16):
        yield delta(data, ROWS, state)
        case = delta(data, ROWS, state, scale=0.25)
        del case["A_log"], case["dt_bias"]
        case["g"], case["beta"] = data.negative(*case["g"].shape), -data.negative(*case["g"].shape)
        case["state"] = case["state"].transpose(2, 3).contiguous().transpose(2, 3)  # K-major
        yield case
        yield delta(data, state=state, query_start_loc=data.starts(), state_indices=data.table(),
                    num_accepted_tokens=data.ints([1, 3, 0, 2]))
        case = delta(data, state=state, query_start_loc=data.starts(),
                     parents=data.ints([-1, 0, -1, -1, 0, -1, 0, 0]))
        yield {**case, "snapshots": data.normal(TOKENS, *case["state"].shape[1:], dtype=state)}
        case = delta(data, state=state, query_start_loc=data.starts(), read_only=True)
        yield case
        earlier = delta(data)
        fold = {f"fold_{name}": earlier[name] for name in ("k", "v", "g", "beta")}
        yield {**case, **fold, "fold_query_start_loc": data.starts(),
               "fold_num_accepted_tokens": data.ints([2, 1, 0, 3])}


def delta_prefill_cases(data):
    for state in (torch.float32, torch.bfloat16):
        case = delta(data, state=state, query_start_loc=data.starts())
        resumes = torch.tensor([True, True, False, True], device=data.device)
        yield {**case, "has_initial_state": resumes}
        yield {**case, "boundary_every": 2,
               "boundary_states": data.normal(3, *case["state"].shape[1:], dtype=state)}
    yield {**case, "state": None, "state_indices": None}


def delta_replay_cases(data):
    for nodes in (None, data.ints([[0, 1], [0, -1], [1, 0], [2, 0]])):
        case = delta(data, state=torch.bfloat16, query_start_loc=data.starts())
        del case["q"]
        yield {**case, "nodes": nodes, "num_accepted_tokens": data.ints([2, 1, 0, 3])}


def ring_rows(data):
    """Rows in the middle of a window, at its beginning and at its end; one is padding."""
    return dict(cursors=data.ints([3, 5, 0, 15]), positions=data.ints([37, 5, 0, 31]), state_indices=data.indices())


def positive(data, *shape):
    return -data.negative(*shape)


def mamba_rings(data, state):
    heads, dims, groups, columns = data.sizes((4, 64, 2, 128), (4, 3, 2, 5))
    return dict(state=data.normal(SLOTS, heads, dims, columns, dtype=state), ring_x=data.normal(SLOTS, heads, 16, dims),
                ring_B=data.normal(SLOTS, groups, 16, columns), ring_dt=positive(data, SLOTS, heads, 16),
                A=data.negative(heads))


def mamba_ring_cases(data):
    for state in (torch.float32, torch.bfloat16):
        case = mamba_rings(data, state)
        heads, dims, columns = case["state"].shape[1:]
        vectors = (ROWS, case["ring_B"].shape[1], columns)
        yield {**case, **ring_rows(data), "x": data.normal(ROWS, heads, dims), "dt": data.normal(ROWS, heads),
               "B": data.normal(*vectors), "C": data.normal(*vectors), "D": data.normal(heads, dtype=torch.float32),
               "z": data.normal(ROWS, heads, dims), "dt_bias": data.normal(heads, dtype=torch.float32),
               "dt_softplus": True, "dt_max": 1.0}


def flush_rows(data):
    """Flushes into the row's own slot and into another one, of a row of padding, and to the number of padding."""
    slots = [slot for slot in data.order if slot > 0]
    return dict(counts=data.ints([3, 5, 0, 16]), state_indices=data.ints([slots[0], 0, *slots[2:4]]),
                targets=data.ints([slots[0], slots[1], slots[4], 0]), pad_slot_id=0)


def mamba_ring_flush_cases(data):
    for state in (torch.float32, torch.bfloat16):
        yield {**mamba_rings(data, state), **flush_rows(data)}


def delta_rings(data, state):
    heads, values, columns, dims = data.sizes((2, 4, 128, 64), (2, 4, 5, 3))
    return dict(state=data.normal(SLOTS, values, dims, columns, dtype=state),
                ring_k=data.normal(SLOTS, heads, 16, columns), ring_k_scale=positive(data, SLOTS, heads, 16),
                ring_u=data.normal(SLOTS, values, 16, dims, dtype=state), ring_g=data.negative(SLOTS, values, 16))


def delta_ring_cases(data):
    for raw in (False, True):
        case = delta_rings(data, torch.bfloat16 if raw else torch.float32)
        values, dims, columns = case["state"].shape[1:]
        keys = (ROWS, case["ring_k"].shape[1], columns)
        gates = dict(g=data.normal(ROWS, values), beta=data.normal(ROWS, values),
                     A_log=data.normal(values, dtype=torch.float32), dt_bias=data.normal(values, dtype=torch.float32))
        if not raw:
            gates = dict(g=data.negative(ROWS, values), beta=positive(data, ROWS, values))
        yield {**case, **ring_rows(data), **gates, "q": data.normal(*keys), "k": data.normal(*keys),
               "v": data.normal(ROWS, values, dims), "use_qk_l2norm": True}


def delta_ring_flush_cases(data):
    for state in (torch.float32, torch.bfloat16):
        yield {**delta_rings(data, state), **flush_rows(data)}


def copy_cases(data):
    for dtype in (torch.float32, torch.bfloat16):
        yield dict(state=data.normal(3, SLOTS, 4, 16, dtype=dtype),
                   source=data.ints(data.order[:5]), target=data.ints(data.order[2:7]))


def zero_cases(data):
    yield dict(state=data.normal(3, SLOTS, 4, 16), slots=data.ints([*data.order[:3], -1]))


def scatter_cases(data):
    yield dict(state=data.normal(SLOTS, 4, 16), intermediate=data.normal(ROWS, 3, 4, 16),
               slots=data.indices(), num_accepted_tokens=data.ints([1, 2, 0, 3]))


def shift_cases(data):
    yield dict(state=data.normal(3, SLOTS, 8, 6), state_indices=data.indices(),
               num_accepted_tokens=data.ints([1, 2, 0, 3]), width=4)


def mla_cases(data):
    H, width, dims = data.sizes((16, 576, 512), (3, 12, 8))
    for q_len, page in ((1, 64), (2, 16)):
        blocks = 200 // page + 1
        pages = torch.randperm(ROWS * blocks, generator=data.generator).to(torch.int32)
        yield dict(q=data.normal(ROWS, q_len, H, width),
                   kv_cache=data.normal(ROWS * blocks, page, width),
                   block_table=pages.reshape(ROWS, blocks).to(data.device),
                   seq_lens=data.ints([200, 2, 65, 17]), softmax_scale=0.135, value_dim=dims)
    # Tokens of 656 bytes. (opcheck compares arguments, for which PyTorch has no float8_e4m3fn.)
    numbers = data.normal(ROWS * 4, 64, 512, dtype=torch.float32).to(torch.float8_e4m3fn)
    scales = data.normal(ROWS * 4, 64, 4, dtype=torch.float32).abs() + 0.1
    tokens = [x.view(torch.uint8) for x in (numbers, scales, data.normal(ROWS * 4, 64, 64, dtype=torch.bfloat16))]
    table = torch.randperm(ROWS * 4, generator=data.generator).to(torch.int32).reshape(ROWS, 4).to(data.device)
    yield dict(q=data.normal(ROWS, 2, H, 576), kv_cache=torch.cat(tokens, 2), block_table=table,
               seq_lens=data.ints([200, 2, 65, 17]), softmax_scale=0.135)


def prefill_cases(data):
    H, width, dims = data.sizes((16, 192, 128), (3, 12, 8))
    for queries, keys, causal in (((200, 2, 0, 65), (200, 130, 9, 65), True), ((70, 1), (9, 130), False)):
        starts, key_starts = (data.ints([sum(n[:i]) for i in range(len(n) + 1)]) for n in (queries, keys))
        yield dict(q=data.normal(sum(queries), H, width), k=data.normal(sum(keys), H, width),
                   v=data.normal(sum(keys), H, dims), query_start_loc=starts, key_start_loc=key_starts,
                   softmax_scale=0.135, causal=causal)


def merge_cases(data):
    H, dims = data.sizes((16, 128), (3, 8))
    yield dict(out_a=data.normal(70, H, dims), lse_a=data.normal(H, 70, dtype=torch.float32),
               out_b=data.normal(70, H, dims), lse_b=data.normal(H, 70, dtype=torch.float32))


def product_cases(data):
    # (opcheck compares arguments, for which PyTorch has no float8_e4m3fn.)
    yield dict(x=data.normal(3, 40, 512), weight=data.normal(3, 136, 512))
    yield dict(x=data.normal(3, 5, 512), weight=data.normal(3, 136, 512), settled_weights=True)


def latent_write_cases(data):
    dims, heads, pairs = data.sizes((512, 16, 32), (8, 3, 2))
    places = torch.randperm(SLOTS * 4, generator=data.generator)[:TOKENS].tolist()
    yield dict(latent=data.normal(TOKENS, dims), k_pe=data.normal(TOKENS, 2 * pairs),
               q_pe=data.normal(TOKENS, heads, 2 * pairs), kv_cache=data.normal(SLOTS, 4, dims + 2 * pairs),
               slots=data.ints([-1, *places[1:]]), positions=data.ints([0, 7, 100, 3000, 5, 1, 2, 99]),
               frequencies=data.normal(pairs, dtype=torch.float32).abs(), norm=data.normal(dims) + 1,
               interleaved=False, magnitude=1.25)


def layer_rows(data, taps, verifies):
    """Tokens, columns of a window, and the arguments of the rows of a layer's step, or of its verification."""
    if not verifies:
        return ROWS, taps - 1, dict(state_indices=data.indices())
    return TOKENS, taps + 1, dict(state_indices=data.table(), query_start_loc=data.starts(),
                                  num_accepted_tokens=data.ints([1, 3, 0, 2]))


def net_cases(data):
    H, HV, width, taps = data.sizes((2, 4, 128, 4), (2, 4, 3, 3))
    channels = (2 * H + HV) * width
    for state in (torch.float32, torch.bfloat16):
        for bias, verifies in ((None, False), (data.normal(channels), False), (None, True)):
            tokens, columns, rows = layer_rows(data, taps, verifies)
            yield dict(x=data.normal(tokens, channels), z=data.normal(tokens, HV, width), a=data.normal(tokens, HV),
                       b=data.normal(tokens, HV), conv_state=data.normal(SLOTS, channels, columns),
                       state=data.normal(SLOTS, HV, width, width, dtype=state), conv_weight=data.normal(channels, taps),
                       conv_bias=bias, A_log=data.normal(HV, dtype=torch.float32), dt_bias=data.normal(HV, dtype=torch.float32),
                       norm_weight=data.normal(width) + 1, **rows)


def mixer_cases(data):
    H, G, P, N, taps = data.sizes((8, 2, 64, 128, 4), (4, 2, 3, 5, 3))
    channels = H * P + 2 * G * N
    for state in (torch.float32, torch.bfloat16):
        for bias, verifies in (({}, False), ({"conv_bias": data.normal(channels)}, False), ({}, True)):
            tokens, columns, rows = layer_rows(data, taps, verifies)
            yield dict(x=data.normal(tokens, channels), z=data.normal(tokens, H, P), dt=data.normal(tokens, H),
                       conv_state=data.normal(SLOTS, channels, columns), state=data.normal(SLOTS, H, P, N, dtype=state),
                       conv_weight=data.normal(channels, taps), A=data.negative(H), D=data.normal(H, dtype=torch.float32),
                       dt_bias=data.normal(H, dtype=torch.float32), norm_weight=data.normal(H * P) + 1,
                       **rows, **bias)


def mamba1_cases(data):
    D, N, R = data.sizes((72, 16, 24), (6, 5, 3))
    norms = dict(norm_eps=1e-5, dt_low=data.normal(ROWS, R), b_weight=data.normal(N) + 1, c_weight=data.normal(N) + 1)
    for state in (torch.float32, torch.bfloat16):
        for more in ({}, norms):
            yield dict(state=data.normal(SLOTS, D, N, dtype=state), x=data.normal(ROWS, D), dt=data.normal(ROWS, D),
                       A=data.negative(D, N), B=data.normal(ROWS, N), C=data.normal(ROWS, N),
                       D=data.normal(D, dtype=torch.float32), z=data.normal(ROWS, D),
                       dt_bias=data.normal(D, dtype=torch.float32), dt_softplus=True, state_indices=data.indices(), **more)


def mamba1_prefill_cases(data):
    D, N = data.sizes((72, 16), (6, 5))
    rows = dict(query_start_loc=starts_of(data, [33, 0, 5, 7]), state_indices=data.indices(),
                has_initial_state=torch.tensor([True, False, True, False], device=data.device))
    for state in (torch.float32, torch.bfloat16):
        for more in (rows, {}):
            T, slots = (45, SLOTS) if more else (9, 1)
            yield dict(x=data.normal(T, D), dt=data.normal(T, D), A=data.negative(D, N), B=data.normal(T, N),
                       C=data.normal(T, N), state=data.normal(slots, D, N, dtype=state),
                       D=data.normal(D, dtype=torch.float32), z=data.normal(T, D),
                       dt_bias=data.normal(D, dtype=torch.float32), dt_softplus=True, **more)


def scaled_cases(data):
    for by_groups in (True, False):
        yield dict(x=data.normal(3, 5, 264), by_groups=by_groups)


def starts_of(data, counts):
    return data.ints([sum(counts[:i]) for i in range(len(counts) + 1)])


def gather_cases(data):
    page, blocks, width = 16, 5, data.sizes(576, 12)
    pages = torch.randperm(ROWS * blocks, generator=data.generator).to(torch.int32).reshape(ROWS, blocks)
    requests = dict(block_table=pages.to(data.device), seq_lens=data.ints([70, 2, 33, 17]),
                    query_start_loc=starts_of(data, [3, 2, 4, 1]))
    yield dict(kv_cache=data.normal(ROWS * blocks, page, width), rows=130, **requests)
    yield dict(kv_cache=data.normal(ROWS * blocks, page, width), rows=40, begin=16, size=32, prefix=True, **requests)
    # Tokens of 656 bytes. (opcheck compares arguments, for which PyTorch has no float8_e4m3fn.)
    numbers = data.normal(ROWS * blocks, page, 512, dtype=torch.float32).to(torch.float8_e4m3fn)
    scales = data.normal(ROWS * blocks, page, 4, dtype=torch.float32).abs() + 0.1
    tokens = [x.view(torch.uint8) for x in (numbers, scales, data.normal(ROWS * blocks, page, 64))]
    yield dict(kv_cache=torch.cat(tokens, 2), rows=130, **requests)


def latent_layer(data, q_lora, fresh):
    """A layer's arguments with so many new tokens of each request: what all forms take, what those from hidden states take,
    what the absorbed form takes; and the heads with their columns (nope, rotary, values), and the pages."""
    H, dc, dn, pairs, dv, hidden = data.sizes((16, 512, 128, 32, 128, 256), (3, 12, 6, 2, 5, 10))
    page, blocks, lengths = 16, 5, [70, 2, 33, 17]

    def weight(*shape):
        return (data.normal(*shape, dtype=torch.float32) * (2 / shape[-1]) ** 0.5).to(torch.bfloat16)

    pages = torch.randperm(ROWS * blocks, generator=data.generator).to(torch.int32).reshape(ROWS, blocks)
    places = [n - m + i for n, m in zip(lengths, fresh) for i in range(m)]
    rows = [r for r, m in enumerate(fresh) for _ in range(m)]
    kv_b = weight(H * (dn + dv), dc)
    per_head = kv_b.view(H, dn + dv, dc)
    shared = dict(positions=data.ints(places), block_table=pages.to(data.device), seq_lens=data.ints(lengths),
                  slots=data.ints([int(pages[r, i // page]) * page + i % page for r, i in zip(rows, places)]),
                  kv_a_norm=data.normal(dc) + 1, frequencies=data.normal(pairs, dtype=torch.float32).abs(),
                  softmax_scale=0.135)
    layer = dict(hidden=data.normal(len(places), hidden), qkv_a=weight(q_lora + dc + 2 * pairs, hidden),
                 q_a_norm=data.normal(q_lora) + 1 if q_lora else None,
                 q_b=weight(H * (dn + 2 * pairs), q_lora or hidden), kv_b=kv_b, o_proj=weight(hidden, H * dv))
    absorbed = dict(kv_cache=data.normal(ROWS * blocks, page, dc + 2 * pairs),
                    w_kc=per_head[:, :dn].transpose(1, 2).contiguous(), w_vc=per_head[:, dn:].contiguous())
    return shared, layer, absorbed, (H, dn, 2 * pairs, dv), (ROWS * blocks, page)


def mla_layer_cases(data):
    for q_lora, fresh, ragged in ((data.sizes(128, 7), [2] * ROWS, False), (0, [3, 0, 4, 1], True)):
        shared, layer, absorbed, _, _ = latent_layer(data, q_lora, fresh)
        more = dict(query_start_loc=starts_of(data, fresh)) if ragged else {}
        yield {**shared, **layer, **absorbed, **more}


def padded_layer_cases(data):
    for q_lora in (data.sizes(128, 7), 0):
        fresh = [3, 0, 4, 1]
        shared, layer, _, (H, _, _, _), pages = latent_layer(data, q_lora, fresh)
        k, v = (data.normal(*pages, H, data.sizes(256, 14)) for _ in "kv")
        yield {**shared, **layer, "k_cache": k, "v_cache": v, "query_start_loc": starts_of(data, fresh)}


def rope_decode_cases(data):
    for fresh, normed in (([1] * ROWS, False), ([3, 0, 4, 1], True)):
        shared, _, absorbed, (H, dn, dr, _), _ = latent_layer(data, 0, fresh)
        more = dict(query_start_loc=starts_of(data, fresh)) if normed else dict(kv_a_norm=None)
        T, width = sum(fresh), absorbed["kv_cache"].shape[2]
        yield {**shared, **absorbed, "q": data.normal(T, H, dn + dr), "kv": data.normal(T, width),
               "interleaved": normed, **more}


CASES = {
    "causal_conv1d_update": conv_cases,
    "causal_conv1d": conv_prefill_cases,
    "selective_state_update": mamba_cases,
    "ssd_prefill": ssd_cases,
    "selective_state_replay": mamba_replay_cases,
    "gated_delta_rule_update": delta_cases,
    "gated_delta_rule_replay": delta_replay_cases,
    "gated_delta_rule_prefill": delta_prefill_cases,
    "selective_state_ring_update": mamba_ring_cases,
    "selective_state_ring_flush": mamba_ring_flush_cases,
    "gated_delta_rule_ring_update": delta_ring_cases,
    "gated_delta_rule_ring_flush": delta_ring_flush_cases,
    "gated_delta_net_decode": net_cases,
    "mamba2_mixer_decode": mixer_cases,
    "mamba1_decode": mamba1_cases,
    "mamba1_prefill": mamba1_prefill_cases,
    "state_copy": copy_cases,
    "state_zero": zero_cases,
    "state_scatter_accepted": scatter_cases,
    "conv_state_shift": shift_cases,
    "mla_decode": mla_cases,
    "mla_prefill": prefill_cases,
    "merge_attention": merge_cases,
    "batched_product": product_cases,
    "scale_to_e4m3": scaled_cases,
    "latent_cache_write": latent_write_cases,
    "latent_cache_gather": gather_cases,
    "mla_layer": mla_layer_cases,
    "padded_mla_layer": padded_layer_cases,
    "mla_rope_decode": rope_decode_cases,
}


# Operators of a kernel of another name, or of two.
KERNELS = {"gated_delta_net_decode": "gated_delta_net_verify", "mamba2_mixer_decode": "mamba2_mixer_verify", "gated_delta_rule_replay": "gated_delta_rule_update", "selective_state_replay": "selective_state_update",
           "selective_state_ring_update": "selective_state_ring", "selective_state_ring_flush": "selective_state_ring",
           "gated_delta_rule_ring_update": "gated_delta_rule_ring", "gated_delta_rule_ring_flush": "gated_delta_rule_ring",
           "state_zero": "state_copy", "state_scatter_accepted": "state_copy", "scale_to_e4m3": "batched_product",
           "latent_cache_write": "latent_cache", "latent_cache_gather": "latent_cache",
           "padded_mla_layer": "mla_layer", "mla_rope_decode": "mla_layer"}


# Operators of batches of any number of rows.
PREFILLS = {"causal_conv1d", "ssd_prefill", "gated_delta_rule_prefill", "mamba1_prefill"}  # one row without starts and lengths
MANY_ROWS = {name for name in CASES if not re.match("mla|merge|batched|scale|latent|padded|state_copy", name)}

# Of each operator, what may be longer than it is in the cases: dimensions of a tensor, or "rank" and "type".
SLOTS_FREE = {"state": {0}, "conv_state": {0}, "boundary_states": {0}, "nodes": {1}}
TABLE = {"state_indices": {1, "rank"}}  # a list may be a table
BITS = {"state": {0, 1, 2, 3, "rank", "type"}}  # moved as they are
PAGES = {"kv_cache": {0, 1}, "block_table": {1}}
ROW_LISTS = {"state_indices", "has_initial_state", "key_start_loc", "seq_lens"}  # else rows are what query_start_loc says
FREE = {
    "causal_conv1d_update": {**SLOTS_FREE, **TABLE, "conv_state": {0, 2}, "x": {0}},
    "causal_conv1d": {**SLOTS_FREE, "conv_state": {0, 2}, "x": {0, 1}},
    "selective_state_update": {**SLOTS_FREE, **TABLE},
    "ssd_prefill": SLOTS_FREE,
    "selective_state_replay": SLOTS_FREE,
    "gated_delta_rule_update": {**SLOTS_FREE, **TABLE},
    "gated_delta_rule_replay": SLOTS_FREE,
    "gated_delta_rule_prefill": {**SLOTS_FREE, "v": {2}},  # without a state
    "selective_state_ring_update": {},  # a state and its rings have the same slots
    "selective_state_ring_flush": {},
    "gated_delta_rule_ring_update": {},
    "gated_delta_rule_ring_flush": {},
    "gated_delta_net_decode": {"conv_state": {2}},  # of a verification; a window and a state have one slot
    "mamba2_mixer_decode": {"conv_state": {2}},  # of a verification; a window and a state have one slot
    "mamba1_decode": {"state": {0}, "dt_low": {1}},
    "mamba1_prefill": SLOTS_FREE,
    "state_copy": BITS,
    "state_zero": {**BITS, "slots": {0}},
    "state_scatter_accepted": {"state": {0}, "intermediate": {1}},
    "conv_state_shift": {"state": {0, 1, 2, 3}},
    "mla_decode": {**PAGES, "q": {1, 2}},
    "mla_prefill": {"q": {0}, "v": {2}},
    "merge_attention": {},
    "batched_product": {"x": {1}, "weight": {1}},
    "scale_to_e4m3": {"x": {0, 1, 2}},
    "latent_cache_write": {**PAGES, "q_pe": {1}},
    "latent_cache_gather": {**PAGES, "kv_cache": {0, 1, 2}},
    "mla_layer": PAGES,
    "padded_mla_layer": PAGES,
    "mla_rope_decode": {**PAGES, "w_vc": {1}},
}


# A case's rows among rows of padding: a launch on the GPU takes 65,534 rows, and these are the first and the last of one,
# the first of the next, and the only row of a third.
LAUNCH = 65534
PLACES = [0, LAUNCH - 1, LAUNCH, 2 * LAUNCH]
MANY = PLACES[-1] + 1
# What has an element for each row, with that of padding; and what has one for each token.
OF_ROWS = {"state_indices": -1, "state_out_indices": -1, "num_accepted_tokens": 1, "has_initial_state": 0,
           "context_lengths": 0, "nodes": 0, "cursors": 0, "positions": 0, "counts": 0, "targets": -1, "slots": -1,
           "intermediate": 0}
OF_TOKENS = {"q", "k", "v", "g", "beta", "x", "dt", "dt_low", "B", "C", "z", "a", "b", "snapshots", "stash_decay", "stash_dt"}


def with_tensors(case, change):
    """The case with its tensors changed."""
    return {name: change(x) if torch.is_tensor(x) else x for name, x in case.items()}


def copied(case):
    """The case with tensors of its own, of the same strides."""
    return with_tensors(case, torch.clone)


def outcome(case, result):
    """Everything that a call leaves: its result, and its arguments, some of which it wrote."""
    tensors = {name: value for name, value in case.items() if torch.is_tensor(value)}
    if isinstance(result, tuple):
        return {**tensors, **{f"result {i}": x for i, x in enumerate(result)}}
    return tensors if result is None else {**tensors, "the result": result}


def expect_bits(found, expected, what):
    for name, wanted in expected.items():
        mine = found[name]
        if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
            raise Difference(f"{what}: {name} is {mine.dtype} {tuple(mine.shape)}, "
                             f"not {wanted.dtype} {tuple(wanted.shape)}")
        a, b = (x.contiguous().flatten().view(torch.uint8).cpu() for x in (mine, wanted))
        if not torch.equal(a, b):
            at = int((a != b).nonzero()[0]) // mine.element_size()
            raise Difference(f"{what}: element {at} of {name} is {mine.flatten()[at].item()}, "
                             f"not {wanted.flatten()[at].item()}")


def expect_near(found, expected, what):
    """Within 2 % of the largest element: roundings differ, misplaced arguments differ by more."""
    for name, wanted in expected.items():
        a, b = found[name].double().cpu(), wanted.double().cpu()
        largest = float(b.abs().max()) if b.numel() else 0.0
        apart = float((a - b).abs().max()) if b.numel() else 0.0
        if not apart <= 0.02 * largest:
            raise Difference(f"{what}: {name} is {apart} apart, of {largest}")


def check_opcheck(op, case, what):
    try:
        torch.library.opcheck(op.default, (), copied(case))
    except Exception as error:
        raise Difference(f"{what}: opcheck: {error}") from error


def twice(x):
    """PyTorch multiplies no float8_e4m3fn."""
    return (x.float() if x.dtype == torch.float8_e4m3fn else x) * 2


def check_compile(op, case, what, backend):
    def step(case):
        result = op(**case)
        if isinstance(result, tuple):
            return tuple(twice(x) for x in result)
        return None if result is None else twice(result)

    direct, compiled = copied(case), copied(case)
    expected = outcome(direct, step(direct))
    torch._dynamo.reset()
    try:
        result = torch.compile(step, fullgraph=True, backend=backend)(compiled)
    except Exception as error:
        raise Difference(f"{what}: torch.compile: {error}") from error
    expect_bits(outcome(compiled, result), expected, f"{what}: torch.compile")


def check_near_cpu(op, case, what):
    on_cpu = with_tensors(case, torch.Tensor.cpu)
    expected = outcome(on_cpu, op(**on_cpu))
    on_gpu = copied(case)
    expect_near(outcome(on_gpu, op(**on_gpu)), expected, f"{what}: beside the CPU")


def check_graph(op, case, other, what):
    """Captures the operator on `case`, and replays the graph on the contents of `other`."""
    captured, direct = copied(case), copied(other)
    op(**copied(case))  # kernels are loaded before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(**captured)
    for name, value in direct.items():
        if torch.is_tensor(value):
            captured[name].copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    expected = outcome(direct, op(**direct))
    expect_bits(outcome(captured, result), expected, f"{what}: CUDA graph")


def among_padding(case):
    """The case among rows of padding: without tokens where query_start_loc says so, else of one token each."""
    wide = copied(case)
    for argument, tensor in case.items():
        name = argument.removeprefix("fold_")
        starts = argument.removesuffix(name) + "query_start_loc"
        if argument == starts and torch.is_tensor(tensor):
            lengths = tensor.new_zeros(MANY + 1)
            lengths[torch.tensor(PLACES) + 1] = tensor.diff()
            wide[argument] = lengths.cumsum(0, dtype=tensor.dtype)
        elif torch.is_tensor(tensor) and (name in OF_ROWS or (name in OF_TOKENS and case.get(starts) is None)):
            wide[argument] = tensor.new_full((MANY, *tensor.shape[1:]), OF_ROWS.get(name, 0))
            wide[argument][PLACES] = tensor
    return wide


def check_many_rows(op, case, what, device):
    alone, wide = with_tensors(copied(case), torch.Tensor.cpu), among_padding(case)
    if case.get("boundary_states") is not None:
        try:
            op(**wide)
        except RuntimeError as error:
            if f"at most {LAUNCH} rows with boundary_states" in str(error):
                return
            raise
        raise Difference(f"{what}: boundaries of more rows than a launch has were taken")
    expected = outcome(alone, op(**alone))
    found = outcome(wide, op(**wide))
    places = {MANY: PLACES, MANY + 1: [*PLACES, MANY]}
    rows = {name: x[places[len(x)]] if len(x) in places else x for name, x in found.items()}
    compare = expect_near if device == "cuda" else expect_bits
    compare(rows, expected, f"{what}: among {MANY} rows")


def check_own_slots(device):
    """Row i of a batch of more rows than a launch has is on slot i without indices, whatever pad_slot_id says."""
    data, rows = Data(device, seed=1), MANY
    case = dict(x=data.normal(rows, 8), conv_state=data.normal(rows, 8, 3), weight=data.normal(8, 4), bias=None)
    own, listed = copied(case), copied(case)
    expected = outcome(listed, torch.ops.lockstep.causal_conv1d_update(
        **listed, state_indices=torch.arange(rows, dtype=torch.int32, device=device)))
    found = outcome(own, torch.ops.lockstep.causal_conv1d_update(**own, pad_slot_id=3))
    expect_bits(found, expected, f"causal_conv1d_update on {device}: {rows} rows without state_indices")


def check_rows_apart(device):
    """A padded batch whose rows lie apart gives the bits of one whose rows follow each other."""
    for name in ("causal_conv1d", "ssd_prefill"):
        for case in CASES[name](Data(device, seed=1)):
            if case.get("context_lengths") is None:
                continue
            tokens = {key: torch.cat([x, x], 1)[:, :x.shape[1]] for key, x in case.items()
                      if torch.is_tensor(x) and x.dim() > 2 and x.shape[:2] == case["x"].shape[:2]}
            near, apart = copied(case), {**copied(case), **tokens}
            expected, found = (outcome(x, getattr(torch.ops.lockstep, name)(**x)) for x in (near, apart))
            expect_bits(found, expected, f"{name} on {device}: rows that lie apart")


def check_many_moves(device):
    """More moves than a launch keeps in shared memory, of slots that are sources and targets."""
    data, slots = Data(device, seed=1), 70000
    state = data.normal(2, slots, 8)
    source, target = (torch.randperm(slots, generator=data.generator).int().to(device) for _ in "st")
    source[:3], target[3:6] = -1, -1
    expected = state.clone()
    expected[:, target[6:].long()] = state[:, source[6:].long()]
    torch.ops.lockstep.state_copy(state, source, target)
    expect_bits({"state": state}, {"state": expected}, f"state_copy on {device}: {slots} moves")


def changed(tensor, argument):
    """The change of a tensor, and the tensor. Longer by its last element: an operator that takes it reads nothing beyond it."""
    if argument.type.kind() == "TensorType":
        yield "None", None
    if argument.alias_info and argument.alias_info.is_write and len(tensor) > 1:
        yield "overlap", tensor[:1].expand_as(tensor)
    if argument.name == "seq_lens" and tensor.device.type == "cpu":
        yield "values", tensor + 2**20
    for dim, size in enumerate(tensor.shape):
        if size:
            yield dim, torch.cat([tensor, tensor.narrow(dim, size - 1, 1)], dim)
    yield "rank", tensor.unsqueeze(-1)
    yield "type", tensor.to(torch.int64)


def check_refusals(name, op, case, what):
    arguments = {argument.name: argument for argument in op.default._schema.arguments}
    for argument, tensor in case.items():
        for change, other in changed(tensor, arguments[argument]) if torch.is_tensor(tensor) else ():
            if change == "None" and sum(map(torch.is_tensor, case.values())) == 1:
                continue  # PyTorch's own refusal
            more_rows = argument == "query_start_loc" and not ROW_LISTS & {
                n for n, x in case.items() if torch.is_tensor(x)}
            if change in FREE[name].get(argument, ()) or (change == 0 and more_rows):
                continue
            bad = {**copied(case), argument: other}
            before = copied(bad)
            said = None
            try:
                op(**bad)
            except (RuntimeError, ValueError) as error:
                said = str(error).split("\n", maxsplit=1)[0]
            where = f"{what}: {argument} with another {'size of dimension ' * (change in range(9))}{change}"
            if said is None:
                raise Difference(f"{where} was taken")
            if not set(re.findall(r"\w+", said)) & case.keys():
                raise Difference(f"{where} was refused with `{said}`")
            expect_bits(outcome(bad, None), outcome(before, None), where)


def check_gaps(op, case, what):
    """An argument with a gap behind each element gives what it gives without, or is refused by its name."""
    near = copied(case)
    expected = outcome(near, op(**near))
    for argument, tensor in case.items():
        if not torch.is_tensor(tensor) or tensor.dim() == 0:
            continue
        wide = tensor.new_zeros((*tensor.shape, 2))
        wide[..., 0] = tensor
        apart = {**copied(case), argument: wide[..., 0]}
        where = f"{what}: {argument} with gaps"
        try:
            result = op(**apart)
        except (RuntimeError, ValueError) as error:
            if argument not in re.findall(r"\w+", str(error).split("\n", maxsplit=1)[0]):
                raise Difference(f"{where} was refused with `{error}`") from error
        else:
            expect_near(outcome(apart, result), expected, where)


def writes(op, case):
    """Whether any tensor that the schema says is written is given."""
    return any(argument.alias_info and argument.alias_info.is_write and
               torch.is_tensor(case.get(argument.name)) for argument in op.default._schema.arguments)


def check(name, device, backend):
    op = getattr(torch.ops.lockstep, name)
    cases = list(CASES[name](Data(device, seed=1)))
    others = list(CASES[name](Data(device, seed=2)))
    checks = ["opcheck", "refusals", f"compile ({backend})"] + (["cpu", "graph"] if device == "cuda" else [])
    for number, (case, other) in enumerate(zip(cases, others, strict=True)):
        at_the_ends = number in (0, len(cases) - 1)
        what = f"{name} on {device}, case {number}"
        before = copied(case)
        check_opcheck(op, case, what)
        check_refusals(name, op, case, what)
        check_gaps(op, case, what)
        lowered = at_the_ends and writes(op, case)
        check_compile(op, case, what, backend if lowered else "aot_eager")
        if device == "cuda":
            check_near_cpu(op, case, what)
            check_graph(op, case, other, what)
        has_rows = name not in PREFILLS or any(case.get(x) is not None for x in ("query_start_loc", "context_lengths"))
        if name in MANY_ROWS and has_rows:
            check_many_rows(op, case, what, device)
        expect_bits(outcome(case, None), outcome(before, None), f"{what}: the check itself")
    if name == "causal_conv1d_update":
        check_own_slots(device)
    if name == "state_copy":
        check_many_moves(device)
    checks += ["rows"] * (name in MANY_ROWS)
    print(f"{device:4}  {name}: {', '.join(checks)} ok, {len(cases)} cases", flush=True)


def check_general_kernel(name):
    """A shape without a kernel of its own runs slowly, and a warning says so; another one says nothing."""

    def bf16(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16, device="cuda")

    def step(N):
        row, number, state = bf16(1, 1, N), bf16(1, 1), torch.zeros(2, 1, 8, N, device="cuda")
        if name == "selective_state_update":
            A = torch.zeros(1, device="cuda")
            return torch.ops.lockstep.selective_state_update(state, bf16(1, 1, 8), number, A, row, row)
        return torch.ops.lockstep.gated_delta_rule_update(row, row, bf16(1, 1, 8), number, number, state)

    torch.set_warn_always(True)
    for N, warns in ((128, False), (100, True)):
        with tempfile.TemporaryFile("w+") as said:  # PyTorch writes an operator's warnings to the descriptor
            kept = os.dup(2)
            os.dup2(said.fileno(), 2)
            step(N)
            os.dup2(kept, 2)
            said.seek(0)
            if ("ran in its general kernel" in said.read()) != warns:
                raise Difference(f"{name} with rows of {N}: it is expected {'' if warns else 'not '}to warn")
    torch.set_warn_always(False)


def check_example(library, device):
    """Runs the README's example: the slots that it names are written, and no other."""
    text = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    example = re.search(r"```python\n(import torch;.*?)```", text, re.DOTALL).group(1)
    example = re.sub(r'load_library\(".*?"\)', f"load_library({library!r})", example)
    names = {}
    exec(example.replace('device = "cuda"', f"device = {device!r}"), names)
    written = names["state"].flatten(1).ne(0).any(1).nonzero().flatten().tolist()
    finite = bool(names["out"].isfinite().all()) and bool(names["out"].ne(0).any())
    if written != sorted(names["slots"].tolist()) or not finite:
        raise Difference(f"the README's example on {device}: slots {written} were written")
    print(f"{device:4}  the README's example: ok", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", help="liblockstep_torch.so")
    parser.add_argument("--backend", help="of torch.compile; inductor, where it has a compiler")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="one alone; both where there are")
    parser.add_argument("--operation", action="append",
                        help="only this operator, or those of this kernel; may be repeated")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.ops.load_library(arguments.library)
    devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
    for device in [arguments.device] if arguments.device else devices:
        compiler = device == "cuda" or shutil.which("g++") or shutil.which("c++")
        backend = arguments.backend or ("inductor" if compiler else "aot_eager")
        for name in CASES:
            if arguments.operation and not {name, KERNELS.get(name)} & set(arguments.operation):
                continue
            check(name, device, backend)
            if device == "cuda" and name in ("selective_state_update", "gated_delta_rule_update"):
                check_general_kernel(name)
        check_rows_apart(device)
        check_example(arguments.library, device)
    if "cuda" not in devices:
        print("cuda  there is no GPU: not checked", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Difference as difference:
        sys.exit(f"{difference}")

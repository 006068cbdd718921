#!/usr/bin/env python3
# ctest: name=ranks.two_and_four_over_gloo labels=quick timeout=600 skip=77 python=torch args="{lockstep_torch_ops}"
# ctest: name=ranks.two_and_four_over_nccl labels=gpu timeout=900 skip=77 python=torch args="{lockstep_torch_ops} --device cuda"
"""Ranks (kernels/torch/ranks.py) against one device: Gloo on CPUs, NCCL on GPUs.

    properties/kernels/torch/ranks_check.py build/cuda/liblockstep_torch.so [--device cuda]

One device computes each rank's part in turn and adds the parts in the order of ranks. Two ranks give its bits, since a
sum of two does not depend on the order; four are near it. The attention is torch.ops.lockstep.mla_layer. Each rank
writes down a collective before it issues it, and the lists are compared: they must be the same. Planted defects must be
found, and a group that waits for ever is ended after LIMIT seconds without a word and its first difference is named.
"""

import argparse
import contextlib
import datetime
import os
import pathlib
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[3] / "kernels/torch"))
from ranks import Buckets, Ranks, data_parallel, layout, padding_of, tensor_parallel  # noqa: E402

LIMIT = 10  # seconds that a group of which all ranks have begun may tell nothing
START = 100  # seconds until all have begun
WAIT = 5  # seconds that Gloo waits in a collective; NCCL would end the process, whose rank the parent is to name
PAGE = 64


class Layer:
    """Weights, the same on every rank: `sizes` as in operators.md; and an MLP (SwiGLU) of `wide` columns."""

    def __init__(self, device, dtype, hidden, q_lora, H, dc, dn, pairs, dv, wide, seed=1):
        make = torch.Generator(device).manual_seed(seed)
        draw = lambda *s: (torch.randn(*s, generator=make, device=device) * s[-1] ** -0.5).to(dtype)  # noqa: E731
        self.device, self.dtype, self.width = device, dtype, hidden
        self.H, self.dc, self.dn, self.pairs, self.dv = H, dc, dn, pairs, dv
        self.qkv_a, self.q_b, self.kv_b = draw(q_lora + dc + 2 * pairs, hidden), draw(H * (dn + 2 * pairs), q_lora), draw(H * (dn + dv), dc)
        self.o_proj, self.gate_up, self.down = draw(hidden, H * dv), draw(2, wide, hidden), draw(hidden, wide)
        self.q_norm, self.kv_norm = (torch.ones(n, device=device, dtype=dtype) for n in (q_lora, dc))
        self.frequencies = 10000.0 ** (-torch.arange(pairs, device=device, dtype=torch.float32) / pairs)

    def heads(self, part, parts):
        """The weights of one rank's heads, as mla_layer takes them."""
        h = slice(part * self.H // parts, (part + 1) * self.H // parts)
        per_head = self.kv_b.view(self.H, self.dn + self.dv, self.dc)[h]
        return dict(qkv_a=self.qkv_a, q_a_norm=self.q_norm, q_b=self.q_b.view(self.H, -1, self.q_b.shape[1])[h].flatten(0, 1),
                    kv_a_norm=self.kv_norm, kv_b=per_head.flatten(0, 1), w_kc=per_head[:, : self.dn].transpose(1, 2).contiguous(),
                    w_vc=per_head[:, self.dn :].contiguous(), frequencies=self.frequencies,
                    o_proj=self.o_proj.view(self.width, self.H, self.dv)[:, h].flatten(1).contiguous(), softmax_scale=0.1)

    def arguments(self, part, parts, prefixes, fresh, seed, form="absorbed", padded=0):
        """mla_layer's, but for hidden: requests with a prefix in the cache and so many new tokens; `padded` requests are unused."""
        heads, make = self.heads(part, parts), torch.Generator("cpu").manual_seed(seed)
        lengths = [p + n for p, n in zip(prefixes, fresh)]
        blocks, B = max(-(-length // PAGE) for length in lengths + [1]), len(lengths) + padded
        ints = lambda values: torch.tensor(values, dtype=torch.int32, device=self.device)  # noqa: E731
        table = torch.arange(B * blocks).view(B, blocks)
        places = [(r, p + i) for r, (p, n) in enumerate(zip(prefixes, fresh)) for i in range(n)]
        cache = (torch.randn(B * blocks, PAGE, self.dc + 2 * self.pairs, generator=make) if B * blocks < 512 else
                 torch.randn(B * blocks, PAGE, self.dc + 2 * self.pairs, device=self.device))
        one = dict(positions=ints([p for _, p in places] + [0] * padded), block_table=ints(table.tolist()),
                   slots=ints([r * blocks * PAGE + p for r, p in places] + [-1] * padded), kv_cache=cache.to(self.device, self.dtype),
                   seq_lens=ints(lengths + [0] * padded), form=form, capacity=sum(lengths),
                   query_start_loc=ints([sum(fresh[:i]) for i in range(len(fresh) + 1)] + [sum(fresh) + 1 + i for i in range(padded)]))
        if set(fresh) == {1} and form == "absorbed":
            one["query_start_loc"] = None
        return heads | one

    def attention(self, *words, **more):
        given = self.arguments(*words, **more)
        return lambda hidden: torch.ops.lockstep.mla_layer(hidden=hidden, **given)

    def mlp(self, part, parts):
        columns = slice(part * self.down.shape[1] // parts, (part + 1) * self.down.shape[1] // parts)
        gate_up, down = self.gate_up[:, columns].flatten(0, 1), self.down[:, columns].contiguous()

        def run(x):
            gate, up = torch.nn.functional.linear(x, gate_up).chunk(2, 1)
            return torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, down)

        return run

    def states(self, rows, seed):
        return torch.randn(rows, self.width, generator=torch.Generator("cpu").manual_seed(seed)).to(self.device, self.dtype)


def small(device):
    if device == "cuda":
        return Layer(device, torch.bfloat16, 256, 128, 16, 512, 128, 32, 128, 512)
    return Layer(device, torch.float32, 16, 8, 4, 12, 6, 2, 5, 24)


# Each rank's requests (prefix, new tokens): unequal batches, an idle rank, all full, a prompt beside decode.
STEPS = {
    "unequal": [[(5, 1), (70, 1)], [(9, 1), (3, 1), (66, 1)]],
    "idle": [[(5, 1), (70, 1)], []],
    "equal": [[(5, 1), (70, 1)], [(9, 1), (3, 1)]],
    "prefill beside decode": [[(0, 37)], [(9, 1), (3, 1)]],
}


def summed(parts):
    whole = parts[0].clone()
    for part in parts[1:]:
        whole += part
    return whole


def near(a, b, bits):
    if bits:
        return torch.equal(a, b)
    bound = 1e-5 if a.dtype == torch.float32 else 2e-2
    return bool((a.double() - b.double()).norm() <= bound * b.double().norm())


def step_of(layer, name, size, rank, part=0, parts=1, padded=0):
    requests = (STEPS[name] * size)[:size][rank]
    fresh = [n for _, n in requests]
    hidden = layer.states(sum(fresh), 10 + rank)
    return hidden, layer.attention(part, parts, [p for p, _ in requests], fresh, 20 + rank, padded=padded)


def tokens_of(name, size):
    return [sum(n for _, n in requests) for requests in (STEPS[name] * size)[:size]]


def one_device(layer, name, size, padding, padded_to=None):
    """The rows of each rank, by one device that computes the ranks' parts in turn."""
    tokens = tokens_of(name, size)
    begin, rows = layout([padded_to] * size if padded_to else tokens, padding)
    whole = torch.zeros(rows, layer.width, device=layer.device, dtype=layer.dtype)
    for rank, n in enumerate(tokens):
        hidden, attention = step_of(layer, name, size, rank, padded=padded_to - n if padded_to else 0)
        if padded_to:
            hidden = torch.cat([hidden, hidden.new_zeros(padded_to - n, layer.width)])
        if n:
            whole[begin[rank] : begin[rank] + n] = attention(hidden)[:n]
    out = summed([layer.mlp(part, size)(whole) for part in range(size)])
    return [out[b : b + n] for b, n in zip(begin, tokens)]


def sound(ranks, layer):
    size, rank, bits = ranks.size, ranks.rank, ranks.size == 2
    mlp = layer.mlp(rank, size)
    for name in STEPS:
        tokens = tokens_of(name, size)
        hidden, attention = step_of(layer, name, size, rank)
        for padding in ("max_len", "sum_len"):
            out = data_parallel(ranks, attention, mlp, hidden, tokens, padding)
            # NCCL's reduce_scatter and the one device add the same two numbers
            assert near(out, one_device(layer, name, size, padding)[rank], bits), f"data parallel, {name}, {padding}"
    for name in ("unequal", "prefill beside decode"):  # heads are sharded: all ranks have the requests of rank 0
        hidden, attention = step_of(layer, name, size, 0, rank, size)
        out = tensor_parallel(ranks, attention, mlp, hidden)
        attended = summed([step_of(layer, name, size, 0, part, size)[1](hidden) for part in range(size)])
        assert near(out, summed([layer.mlp(part, size)(attended) for part in range(size)]), bits), f"tensor parallel, {name}"
        whole = layer.mlp(0, 1)(step_of(layer, name, size, 0)[1](hidden))
        assert near(out, whole, False), f"tensor parallel against all heads, {name}"
    for name in ("unequal", "equal", "idle"):  # a graph for each bucket, replayed twice
        tokens, buckets = tokens_of(name, size), Buckets(ranks, layer.states(1, 0))
        hidden = step_of(layer, name, size, rank)[0]
        for bucket in (2, 4):
            padded = bucket - len(hidden)
            attention = step_of(layer, name, size, rank, padded=padded)[1] if padded >= 0 else lambda x: x
            buckets.capture(bucket, lambda x, a=attention, b=bucket: data_parallel(ranks, a, mlp, x, [b] * size, "max_len"))
        wanted = one_device(layer, name, size, "max_len", min(b for b in (2, 4) if b >= max(tokens)))[rank]
        for _ in range(2):
            assert near(buckets.step(tokens, hidden), wanted, bits), f"graph, {name}"


def planted(defect, ranks, layer):
    """A step with a defect of one rank, or of the slice on all ranks."""
    name = "idle" if defect.startswith("idle") else "unequal"
    size, rank, tokens = ranks.size, ranks.rank, tokens_of(name, ranks.size)
    hidden, attention = step_of(layer, name, size, rank)
    mlp, wanted = layer.mlp(rank, size), one_device(layer, name, size, "max_len")[rank]
    if defect == "idle rank skips one" and rank == 1:
        ranks.scatter(mlp(layer.states(max(tokens) * size, 0)), tokens, "max_len")
        return
    if defect == "idle rank hangs" and rank == 1:
        time.sleep(3600)
    if defect == "graph of last step":
        buckets = Buckets(ranks, layer.states(1, 0))
        for bucket in (2, 4):
            buckets.capture(bucket, lambda x, b=bucket: data_parallel(ranks, lambda y: y, mlp, x, [b] * size, "max_len"))
        buckets.step([2] * size if rank == 0 else tokens, hidden)  # the step before had two rows a rank
        return
    if defect == "rank pads to its own size":
        tokens = [len(hidden)] * size
    out = data_parallel(ranks, attention, mlp, hidden, tokens, "max_len")
    if defect == "slice off by one rank":
        begin, rows = layout(tokens, "max_len")
        whole = ranks.gather(out, tokens, "max_len")
        begin = begin[(rank + 1) % size]
        out = whole[begin : begin + len(hidden)]
    assert near(out, wanted, size == 2), "another rank's rows"


def worker(rank, size, device, ops, folder, defect):
    torch.set_num_threads(1)
    torch.ops.load_library(ops)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size,
                            timeout=datetime.timedelta(seconds=WAIT if defect and device == "cpu" else 300))
    with open(f"{folder}/{rank}.log", "w", buffering=1) as log, torch.inference_mode():
        ranks = Ranks(lambda line: log.write(line + "\n"))
        try:
            (sound if defect is None else lambda *a: planted(defect, *a))(ranks, small(device))
            if device == "cuda":
                torch.cuda.synchronize()
            pathlib.Path(f"{folder}/{rank}.end").write_text("ended")
        except Exception as error:  # the parent judges
            pathlib.Path(f"{folder}/{rank}.end").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # a group that has lost a rank would wait for it


def compared(folder, size):
    """The first collective in which the ranks differ; None where all lists are the same."""
    lists = [pathlib.Path(f"{folder}/{rank}.log").read_text().splitlines() for rank in range(size)]
    for index in range(max(map(len, lists))):
        lines = [one[index] if index < len(one) else "nothing" for one in lists]
        if len(set(lines)) > 1:
            return f"collective {index}: " + ", ".join(f"rank {rank} {line}" for rank, line in enumerate(lines))
    return None


def progress(folder):
    """How many ranks have begun, and how much all of them have told."""
    logs = list(pathlib.Path(folder).glob("*.log"))
    return len(logs), sum(log.stat().st_size for log in logs) + len(list(pathlib.Path(folder).glob("*.end")))


def group(size, device, ops, defect=None, limit=LIMIT):
    """Runs a group: what the lists differ in, what each rank said, and whether it was ended."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn" if device == "cuda" else "fork")
        ranks = [context.Process(target=worker, args=(rank, size, device, ops, folder, defect)) for rank in range(size)]
        for one in ranks:
            one.start()
        said_last, began = (-1, -1), time.monotonic()
        while any(one.is_alive() for one in ranks):
            says = progress(folder)
            if says != said_last:
                said_last, began = says, time.monotonic()
            if time.monotonic() - began > (limit if says[0] == size else START):
                break
            time.sleep(0.05)
        hung = [rank for rank, one in enumerate(ranks) if one.is_alive()]
        for one in ranks:
            one.kill()
            one.join()
        said = []
        for rank in range(size):
            with contextlib.suppress(OSError):
                said.append(pathlib.Path(f"{folder}/{rank}.end").read_text())
        return compared(folder, size), said, hung


DEFECTS = ("idle rank skips one", "idle rank hangs", "rank pads to its own size", "graph of last step", "slice off by one rank")


def check(device, ops, sizes):
    failed = 0
    for size in sizes:
        difference, said, hung = group(size, device, ops, limit=90)
        good = difference is None and said == ["ended"] * size and not hung
        failed += not good
        print(f"{size} ranks: {'equal to one device' if good else (difference, said, hung)}", flush=True)
    chosen = [padding_of(*step) for step in (([4, 4], False), ([8, 0], False), ([9, 0, 0], False), ([4, 4], True))]
    if chosen != ["max_len", "max_len", "sum_len", "sum_len"]:
        failed += 1
        print(f"the choice of padding: {chosen}")
    for defect in DEFECTS:
        difference, said, hung = group(2, device, ops, defect, LIMIT if device == "cpu" else 2 * LIMIT)
        found = difference or (None if said == ["ended"] * 2 else next((s for s in said if s != "ended"), "no word"))
        named = found is not None and (difference is not None or "another rank's rows" in found) and (defect != "idle rank hangs" or 1 in hung)
        failed += not named
        print(f"planted, {defect}: {found or 'NOT FOUND'}{f'; ended ranks {hung}' if hung else ''}", flush=True)
    return failed


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("ops")
    words.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = words.parse_args()
    if not dist.is_available():
        print("skipped: this PyTorch has no torch.distributed")
        sys.exit(77)
    sizes = [size for size in (2, 4) if given.device == "cpu" or size <= torch.cuda.device_count()]
    if not sizes:
        print("skipped: there are fewer than two GPUs")
        sys.exit(77)
    sys.exit(1 if check(given.device, str(pathlib.Path(given.ops).resolve()), sizes) else 0)

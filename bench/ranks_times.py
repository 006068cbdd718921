#!/usr/bin/env python3
"""Times a layer of DeepSeek-V3 (attention and a dense MLP) on one GPU and on several, over NCCL, and writes ranks_times.json.

    python3 bench/ranks_times.py build/current/liblockstep_torch.so --out FOLDER [--ranks 1,2,4]

Each of n ranks is given B requests to decode, whose contexts have 4,096 tokens, or one prompt. Data parallel: a rank attends for its
own requests with all heads. Tensor parallel: each attends for all n B with its part of the heads. The MLP is divided by columns in
both. `chain` is PyTorch's operators around the same attention kernel, with the same collectives of torch.distributed. Every
call is a CUDA graph, replayed again and again; times are of the slowest rank, in µs.

`without` is the same graph without collectives, and `communication` the share that they add. `collectives` are they
alone. `limit` counts each weight and each latent once at this run's copy rate, or the products at its rate of bf16 products if
these take longer, and the bytes that a rank sends at the rate of an all_reduce of 1 GiB, one after the other."""
import argparse
import json
import os
import pathlib
import statistics
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import rms_norm

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT / "properties/kernels/torch"), str(ROOT / "kernels/torch")]
from ranks import Buckets, Ranks, data_parallel, padding_of, tensor_parallel  # noqa: E402
from ranks_check import Layer  # noqa: E402

CONTEXT = 4096
DECODES = (1, 8, 32, 128, 256)
PROMPTS = (2048, 8192)
BOUND = 3e-2  # between two ways that store every stage in bf16; each is 6e-3 from float64


class Silent(Ranks):
    """Ranks that issue no collective."""

    def all_reduce(self, whole):
        return whole

    def gather(self, own, tokens, padding):
        return own.new_zeros(sum(tokens), own.shape[1])

    def scatter(self, partial, tokens, padding):
        return partial[: tokens[self.rank]]


def rotated(x, cosine, sine):
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([a * cosine - b * sine, a * sine + b * cosine], -1).flatten(-2).to(x.dtype)


def chain(given):
    """mla_layer by PyTorch's operators around our mla_decode, or mla_prefill for prompts without a prefix."""
    H, dc, dn = given["w_kc"].shape
    low_rank, cache, slots = given["q_b"].shape[1], given["kv_cache"].flatten(0, 1), given["slots"].long()
    absorb, values = given["w_kc"].transpose(1, 2), given["w_vc"].transpose(1, 2)

    def run(hidden):
        low = hidden @ given["qkv_a"].t()
        q = (rms_norm(low[:, :low_rank], (low_rank,), given["q_a_norm"], 1e-6) @ given["q_b"].t()).unflatten(1, (H, -1))
        angle = given["positions"][:, None, None] * given["frequencies"]
        cosine, sine = angle.cos(), angle.sin()
        latent = rms_norm(low[:, low_rank : low_rank + dc], (dc,), given["kv_a_norm"], 1e-6)
        cache[slots] = torch.cat([latent, rotated(low[:, None, low_rank + dc :], cosine, sine)[:, 0]], 1)
        q_pe = rotated(q[..., dn:], cosine, sine)
        if given["query_start_loc"] is None:
            wide = torch.cat([torch.bmm(q[..., :dn].transpose(0, 1), absorb).transpose(0, 1), q_pe], 2)
            out = torch.ops.lockstep.mla_decode(wide[:, None], given["kv_cache"], given["block_table"], given["seq_lens"],
                                                given["softmax_scale"])[0][:, 0]
            heads = torch.bmm(out.transpose(0, 1), values).transpose(0, 1)
        else:
            context, starts = cache[slots], given["query_start_loc"]
            kv = (context[:, :dc] @ given["kv_b"].t()).unflatten(1, (H, -1))
            k = torch.cat([kv[..., :dn], context[:, None, dc:].expand(-1, H, -1)], 2)
            heads = torch.ops.lockstep.mla_prefill(torch.cat([q[..., :dn], q_pe], 2), k, kv[..., dn:], starts, starts,
                                                   given["softmax_scale"])[0]
        return heads.reshape(len(hidden), -1) @ given["o_proj"].t()

    return run


def replays_us(graph, replays, slowest):
    """Microseconds of a replay, the median of 7 runs, of the slowest rank."""
    times = []
    for _ in range(8):
        slowest(0.0)  # all ranks begin together
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / replays)
    return slowest(statistics.median(times[1:]))


def rates(rank, size, slowest):
    """The rates of a copy (bytes read and written) and of all_reduce in GB/s, and of bf16 products in TFLOP/s."""

    def us(call):
        graph = Buckets(Ranks(), torch.zeros(1, 1, device="cuda"))
        graph.capture(1, lambda x: call())
        return replays_us(graph.graphs[1][2], 3, slowest)

    a = torch.randn(1 << 29, device="cuda")
    b = torch.empty_like(a)
    said = {"copy_gbps": 2 * 4 * a.numel() / us(lambda: torch.neg(a, out=b)) / 1e3}  # a kernel: a copy in a graph is slower
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    said["matmul_tflops"] = 2 * 8192**3 / us(lambda: x @ y) / 1e6
    if size > 1:
        whole = b[: 1 << 28]
        said["all_reduce_gbps"] = 2 * (size - 1) / size * 4 * whole.numel() / us(lambda: dist.all_reduce(whole)) / 1e3
    return {key: round(value, 1) for key, value in said.items()}


def limit_us(layer, way, size, fresh, context, rate):
    """The least time of a layer and of its collectives."""
    rows, parts = (len(fresh), size if way == "tensor parallel" else 1)
    of_heads = (layer.q_b.numel() + layer.kv_b.numel() + layer.o_proj.numel()) / parts
    tokens, whole = sum(fresh), sum(fresh) if way == "tensor parallel" else sum(fresh) * size
    attention, mlp = layer.qkv_a.numel() + of_heads, (layer.gate_up.numel() + layer.down.numel()) / size
    width, H = layer.dc + 2 * layer.pairs, layer.H / parts
    decode = set(fresh) == {1}
    pairs = context * rows if decode else sum(n * (n + 1) / 2 for n in fresh)
    columns = width + layer.dc if decode else layer.dn + 2 * layer.pairs + layer.dv
    flops = 2 * (tokens * attention + whole * mlp + pairs * H * columns)
    size_bytes = 2 * (attention + mlp + (context * rows if decode else tokens) * width)
    sent = 0 if size == 1 else 2 * 2 * (size - 1) / size * whole * layer.width * 2
    if way == "data parallel" and padding_of([tokens] * size, not decode) == "max_len":
        sent /= 2  # all_gather and reduce_scatter send half of what two all_reduce do
    return max(size_bytes / rate["copy_gbps"], flops / rate["matmul_tflops"] / 1e3) / 1e3, sent / rate.get("all_reduce_gbps", 1) / 1e3


def row_of(layer, ranks, way, B, prompt, rate, slowest):
    size, rank = ranks.size, ranks.rank
    sharded = way == "tensor parallel"
    requests = B * (size if sharded else 1)
    prefixes, fresh = ([0] * requests, [prompt] * requests) if prompt else ([CONTEXT - 1] * requests, [1] * requests)
    part, parts = (rank, size) if sharded else (0, 1)
    given = layer.arguments(part, parts, prefixes, fresh, 20 + (0 if sharded else rank), form="one_shot" if prompt else "absorbed")
    mlp, rows = layer.mlp(rank, size), sum(fresh)
    hidden = layer.states(rows, 10 + (0 if sharded else rank))
    tokens = [rows] * size

    def graph(attention, ranks, mlp=mlp):
        def run(x):
            if sharded or size == 1:
                return tensor_parallel(ranks, attention, mlp, x) if size > 1 else mlp(attention(x))
            return data_parallel(ranks, attention, mlp, x, tokens, padding_of(tokens, bool(prompt)))

        buckets = Buckets(ranks, hidden)
        buckets.capture(rows, run)
        buffer, _, captured, out, _ = buckets.graphs[rows]
        buffer.copy_(hidden)
        return captured, out, buffer

    replays = 2 if prompt else 20
    row = {"ranks": size, "way": way, **({"prompt": prompt} if prompt else {"B": B})}
    outs = {}
    ours = lambda x: torch.ops.lockstep.mla_layer(hidden=x, **given)  # noqa: E731
    for name, attention, of in (("time", ours, ranks), ("chain", chain(given), ranks), ("without", ours, Silent())):
        if size == 1 and name == "without":
            continue
        captured, out, kept = graph(attention, of)
        row[name] = round(replays_us(captured, replays, slowest), 1)
        outs[name] = out.clone()
        del captured, out, kept
        torch.cuda.empty_cache()
    row["differs"] = float(f"{slowest(((outs['time'].double() - outs['chain'].double()).norm() / outs['chain'].double().norm()).item()):.2g}")
    if not row["differs"] < BOUND:
        row["wrong"] = f"more than {BOUND} from the chain"
    compute, sent = limit_us(layer, way, size, fresh, CONTEXT, rate)
    if size > 1:
        hidden.zero_()
        captured, *kept = graph(lambda x: x, ranks, lambda x: x)
        row["collectives"] = round(replays_us(captured, replays, slowest), 1)
        row["communication"] = round(1 - row["without"] / row["time"], 3)
        row["limit of collectives"] = round(sent, 1)
        del captured, kept
        torch.cuda.empty_cache()
    row["limit"] = round(compute + sent, 1)
    row["limit_share"] = round((compute + sent) / row["time"], 3)
    return row


def worker(rank, size, ops, store, out):
    torch.ops.load_library(ops)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)

    def slowest(value):
        number = torch.tensor(value, device="cuda", dtype=torch.float64)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return number.item()

    with torch.inference_mode():
        rate, ranks = rates(rank, size, slowest), Ranks()
        torch.cuda.empty_cache()
        if rank == 0:
            print(f"{size} ranks: {rate}", flush=True)
        layer = Layer("cuda", torch.bfloat16, 7168, 1536, 128, 512, 128, 32, 128, 18432)
        for way in ("one GPU",) if size == 1 else ("data parallel", "tensor parallel"):
            for B, prompt in [(B, 0) for B in DECODES] + [(1, prompt) for prompt in PROMPTS]:
                row = row_of(layer, ranks, way, B, prompt, rate, slowest)
                if rank == 0:
                    print(row, flush=True)
                    with open(out, "a") as file:
                        file.write(json.dumps(row | {"rates": rate}) + "\n")
    torch.cuda.synchronize()
    os._exit(0)  # leaving a group in order takes seconds


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("ops")
    words.add_argument("--out", type=pathlib.Path, required=True)
    words.add_argument("--ranks", default="1,2,4")
    given = words.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    lines = given.out / "ranks_times.jsonl"
    for size in map(int, given.ranks.split(",")):
        if size <= torch.cuda.device_count():
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(worker, (size, str(pathlib.Path(given.ops).resolve()), f"{folder}/store", str(lines)), nprocs=size)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    rates_of = {row["ranks"]: row.pop("rates") for row in rows}
    (given.out / "ranks_times.json").write_text(json.dumps({"rates": rates_of, "times": rows}, indent=1) + "\n")
    return int(any("wrong" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""The products beside the peers, from reports/kernels/batched_product.json.

    bench/peers/products.py [FILE]      a line for each row, then how many rows keep each bound

Ratios are our time over the peer's: over the fastest peer that promises that a row's bits do not depend on the batch, over
cuBLAS without a workspace, for which rows_bits.py finds it so, and over PyTorch's cuBLAS, for which it is not. `settled` is our
launch that is told that the weights were written before the one in front began. `copies` and `reads` are the time that the
row's bytes take at the copy rate and at the read rate, or its FLOPs at the matmul rate if that is longer, over cuBLAS' time.
"""
import json
import math
import re
import sys
from pathlib import Path

PROMISES, FOUND, TORCH = ", batch-invariant", ", found batch-invariant", "torch "
FILE = Path(__file__).resolve().parents[2] / "reports/kernels/batched_product.json"


def fastest(entries, text):
    """The least time of the entries whose names have this text, or None."""
    return min((entry["time_us"] for entry in entries if text in entry["name"]), default=None)


def extents_of(case):
    """G, M, N and K."""
    return [int(number) for number in re.findall(r"[GMNK]=(\d+)", case)]


def limit_of(case):
    """The most that the row may take of either cuBLAS."""
    return 1.15 if extents_of(case)[1] <= 32 else 1.3


def row_of(row, chip):
    """The case, our time, and the ratios of a row of speed; None for what it has no peer for."""
    ours, settled = row["time_us"], fastest(row["variants"], "settled")
    promises, found, torch = (fastest(row["peers"], text) for text in (PROMISES, FOUND, TORCH))
    cublas = found or torch
    flops = 2 * math.prod(extents_of(row["case"])) / (2 if "e4m3" in row["case"] else 1)  # e4m3 has twice the rate
    copies, reads = (max(row["bytes"] / chip[rate] / 1e3, flops / chip["matmul_tflops"] / 1e6) for rate in ("copy_gbps", "read_gbps"))
    return {"case": row["case"], "ours": ours, "promises": promises and ours / promises, "found": found and ours / found,
            "torch": torch and ours / torch, "settled": settled, "settled/promises": settled and promises and settled / promises,
            "settled/found": settled and found and settled / found, "copies": cublas and copies / cublas, "reads": cublas and reads / cublas}


def say(rows, name, text, bound, bound_of):
    """Prints how many rows keep a bound of a ratio, and those that do not."""
    of = [row for row in rows if row[name] is not None]
    missed = [row for row in of if row[name] > bound_of(row["case"])]
    print(f"\nat most {bound} of {text}: {len(of) - len(missed)} of {len(of)} rows")
    for row in missed:
        print(f"    {row[name]:.3f}  {row['case']}")


def main():
    chip = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else FILE).read_text())["chips"][0]
    rows = [row_of(row, chip) for row in chip["speed"]]
    names = list(rows[0])
    print(f"{names[0]:<50}" + "".join(f"{name:>18}" for name in names[1:]))
    for row in rows:
        print(f"{row['case']:<50}" + "".join(f"{'-' if row[name] is None else format(row[name], '.3f'):>18}" for name in names[1:]))
    for name, text in (("promises", "the fastest peer that promises it"), ("found", "cuBLAS without a workspace")):
        say(rows, name, text, "0.9", lambda case: 0.9)
        say(rows, f"settled/{name}", f"{text}, weights settled", "0.9", lambda case: 0.9)
    for name, text in (("found", "cuBLAS without a workspace"), ("torch", "PyTorch's cuBLAS")):
        say(rows, name, text, "1.15 (up to 32 tokens) and 1.3", limit_of)


if __name__ == "__main__":
    main()

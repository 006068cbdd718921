#!/usr/bin/env python3
# ctest: name=operators.are_within_flashmlas_tolerances labels=quick timeout=600 skip=77 python=torch args={lockstep_torch_ops}
"""mla_decode over the grid of FlashMLA's own test of its dense decode, judged by that test's tolerances.

    properties/kernels/torch/flashmla_grid_check.py build/cuda/liblockstep_torch.so [--device cuda]

Requests 1, 2, 6, 64; queries 1, 2, 4; keys 20, 140, 4096, alike or drawn; heads 1 to 128; causal or not; some requests
without keys. Data is normal / 10 within 1. Pages of 64 tokens lie in any order, all that nobody stores is NaN, entries
after a request's last page are 2147480000. Beyond that grid, pages of 1 and of 16 tokens. On the CPU, where the operator
is the reference, requests up to 6, keys up to 140 and heads up to 9.

An output may differ from attention in float64 by 8e-4 or by 2.01 / 128 of itself, all together by a cosine of 5e-6; an
lse by 1e-6 or 8.01 / 65536 of itself; infinities lie where they should. One line at the end, or the first case that fails.
Mistakes are planted in one case: no scale, no causal border, a base of 2, the newest key unseen. Each has to show.
"""

import argparse
import itertools
import sys

import torch

WIDTH, VALUES = 576, 512
NO_PAGE = 2147480000


class Case:
    """Inputs of one case. `some`: a third of the requests have no keys."""

    def __init__(self, device, B, queries, keys, heads, drawn, some, causal, page):
        self.text = (f"B={B} queries={queries} keys={keys}{' drawn' if drawn else ''}{' some 0' if some else ''} "
                     f"heads={heads} causal={causal} page={page}")
        self.causal, self.scale = causal, WIDTH ** -0.5
        lengths = torch.full((B,), float(keys))
        if drawn:
            lengths = (lengths + torch.randn(B) * keys / 2).clamp(min=queries)
        if some:
            lengths[torch.randperm(B)[:(B + 2) // 3]] = 0
        self.lengths = lengths.to(torch.int32).to(device)
        blocks = -(-self.lengths // page)
        columns, used = int(blocks.max()) + 2, int(blocks.sum())
        is_page = torch.arange(columns, device=device) < blocks[:, None]
        self.table = torch.full((B, columns), NO_PAGE, dtype=torch.int32, device=device)
        self.table[is_page] = torch.randperm(used + 3, device=device)[:used].to(torch.int32)
        draw = lambda *shape: (torch.randn(shape, device=device) / 10).clamp(-1, 1).to(torch.bfloat16)
        self.q, self.cache = draw(B, queries, heads, WIDTH), draw(used + 3, page, WIDTH)
        stored = torch.zeros(used + 3, page, dtype=torch.bool, device=device)
        tokens = torch.arange(columns * page, device=device).view(columns, page)
        stored[self.table[is_page].long()] = (tokens < self.lengths[:, None, None])[is_page]
        self.cache[~stored] = float("nan")

    def expected(self):
        """Outputs and lse in float64, a request at a time."""
        B, queries, heads, _ = self.q.shape
        page, double = self.cache.shape[1], dict(dtype=torch.float64, device=self.q.device)
        out, lse = torch.zeros(B, queries, heads, VALUES, **double), torch.full((B, heads, queries), torch.inf, **double)
        for b, length in enumerate(self.lengths.tolist()):
            entries = self.table[b, :-(-length // page)].long()
            K = self.cache[entries].flatten(0, 1)[:length].double()
            seen = [max(length - queries + 1 + i, 0) if self.causal else length for i in range(queries)]
            for i, n in enumerate(seen):
                if n == 0:
                    continue
                scores = self.q[b, i].double() @ K[:n].T * self.scale
                lse[b, :, i] = scores.logsumexp(-1)
                out[b, i] = scores.softmax(-1) @ K[:n, :VALUES]
        return out, lse


def difference(got, want, absolute, relative, cosine):
    """The fault of `got`, or nothing."""
    got = got.double()
    finite = want.isfinite()
    if not torch.equal(got[~finite], want[~finite]) or not got[finite].isfinite().all():
        return "infinities or NaN where there should be none"
    got, want = got[finite], want[finite]
    error = (got - want).abs()
    worst = torch.minimum(error / absolute, error / (want.abs() * relative).clamp(min=1e-300))
    if worst.numel() and worst.max() > 1:
        return f"an element differs by {worst.max():.3g} times what is allowed"
    whole = (got.square().sum() + want.square().sum()).item()
    apart = 1 - 2 * (got * want).sum().item() / whole if whole > 1e-12 else 0.0
    return f"cosine differs by {apart:.3g}" if apart > cosine else ""


def wrong(out, lse, expected):
    """The fault of a result, or nothing."""
    for name, text in (("out", difference(out, expected[0], 8e-4, 2.01 / 128, 5e-6)),
                       ("lse", difference(lse, expected[1], 1e-6, 8.01 / 65536, 5e-6))):
        if text:
            return f"{name}: {text}"
    return ""


def run(case, **changed):
    """out and lse of the operator."""
    values = {name: changed.get(name, getattr(case, name)) for name in ("lengths", "scale", "causal")}
    return torch.ops.lockstep.mla_decode(case.q, case.cache, case.table, values["lengths"], values["scale"],
                                         causal=values["causal"])


def unnoticed_mistakes(device):
    """Planted mistakes that the tolerances let pass."""
    case = Case(device, 6, 4, 140, 9, True, True, True, 64)
    expected = case.expected()
    out, lse = run(case)
    results = {"no scale": run(case, scale=1.0), "all keys seen": run(case, causal=False),
               "an lse in powers of two": (out, lse / 0.6931), "an lse of -inf": (out, torch.where(lse.isinf(), -lse, lse)),
               "the newest key unseen": run(case, lengths=(case.lengths - 1).clamp(min=0))}
    return [name for name, result in results.items() if not wrong(*result, expected)]


def grid(device):
    """Arguments of cases."""
    small = device == "cpu"
    B, keys = ((1, 2, 6), (20, 140)) if small else ((1, 2, 6, 64), (20, 140, 4096))
    heads = (1, 3, 9) if small else (1, 3, 9, 63, 64, 126, 128)
    for drawn, some in ((False, False), (True, False), (True, True)):
        yield from itertools.product(B, (1, 2, 4), keys, heads, (drawn,), (some,), (False, True), (64,))
    yield from itertools.product((6,), (1, 4), (140,), heads, (True,), (True,), (False, True), (1, 16))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", help="liblockstep_torch.so")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    arguments = parser.parse_args()
    torch.ops.load_library(arguments.library)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    count = 0
    for values in grid(arguments.device):
        case = Case(arguments.device, *values)
        if text := wrong(*run(case), case.expected()):
            print(f"{case.text}: {text}")
            return 1
        count += 1
    if missed := unnoticed_mistakes(arguments.device):
        print(f"{arguments.device}: not noticed: {', '.join(missed)}")
        return 1
    print(f"{arguments.device}: {count} cases within FlashMLA's tolerances")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Whether the bits of a product's row depend on the batch: cuBLAS without a workspace, and PyTorch's call of it.

    bench/peers/rows_bits.py        on a machine with a GPU: for each product of latents.py, the batches of 1 to 259, of
                                    whole 64 tokens and one less up to 4,096, whose rows differ from those of 4,096 tokens
"""
import torch

import latents
import load


def main():
    cublas = load.cublas_invariant()
    calls = {"cuBLAS without workspace": cublas.bmm, "torch bmm": lambda x, w: torch.bmm(x, w.transpose(1, 2))}
    batches = [*range(1, 260), *(m - less for m in range(320, 4097, 64) for less in (1, 0))]
    for name, G, N, K in sorted({(name, G, N, K) for name, G, _, N, K in latents.PRODUCTS}):
        x, w = (torch.randn(G, rows, K, device="cuda").to(torch.bfloat16) for rows in (4096, N))
        for call, multiply in calls.items():
            whole = multiply(x, w)
            differ = [M for M in batches if not torch.equal(multiply(x[:, :M].contiguous(), w), whole[:, :M])]
            print(f"{name} [{N}, {K}], {call}: {len(differ)} of {len(batches)} batches differ {differ[:8]}", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""vLLM 0.33.0, hits inside a block: an attention block that another request fills in this very step is
copied before the forward that fills it.

    python3 vllm_copied_kv.py        # with vLLM installed
"""

import sys

from vllm_blocks import Blocks, attention, mamba

blocks = Blocks(40, [attention(8), mamba(8)], hash_block=2, retention=0)
prompt = list(range(100, 160))
requests = {}


def admit(name, tokens, n):
    request = requests[name] = blocks.request(name, tokens)
    admitted = blocks.admit(request)
    print(f"   {name}: {admitted[1]} tokens cached, computes up to {admitted[1] + n}")
    blocks.run(request, n, admitted)


def go_on(name, n):
    request = requests[name]
    print(f"   {name}: computes {request.num_computed_tokens} to {request.num_computed_tokens + n}")
    blocks.run(request, n)


print("step 1")
admit("A", prompt[:21], 8)
admit("B", prompt[:40], 8)
blocks.end_step()
for number, n in ((2, 8), (3, 4)):
    print(f"step {number} (A takes the step's tokens)")
    go_on("A", n)
    blocks.end_step()
print("step 4")
go_on("A", 1)
go_on("B", 8)
blocks.end_step()
print("step 5")
go_on("B", 8)
admit("C", prompt[:28] + [1, 2, 3], 4)
source = blocks.table(0, requests["B"])[2][0]
copies = blocks.end_step()
print(f"   copies before the forward of this step: {copies}")
print(f"B's tokens 16 to 24 are written into block {source} by that forward, and not before")
sys.exit(1 if source in [one for one, _ in copies] else 0)

#!/usr/bin/env python3
"""vLLM 0.33.0, Mamba "align" mode with internal prefill checkpoints: after a hit that ends inside a
block, the copy of the hit's state is keyed as the state of the whole block.

    python3 vllm_checkpoint_key.py        # with vLLM installed
"""

import sys

from vllm_blocks import Blocks, attention, mamba

blocks = Blocks(64, [attention(8), mamba(8, checkpoints=1)], hash_block=2)
prompt = list(range(100, 200))


def serve(name, tokens):
    request = blocks.request(name, tokens)
    admitted = blocks.admit(request)
    print(f"{name}: {len(tokens)} tokens, {admitted[1]} of them cached")
    hit = admitted[1]
    while request.num_computed_tokens < len(tokens):
        done = request.num_computed_tokens if admitted is None else hit
        tokens_left = len(tokens) - done
        n = blocks.split(request, tokens_left, 0 if admitted is None else hit)
        blocks.run(request, n, admitted)
        admitted = None
        copies = blocks.end_step()
        print(f"   one chunk, {done} to {done + n}; copies before it: {copies}")
    return request


a = serve("A", prompt[:15])
blocks.manager.free(a)
b = serve("B", prompt[:24] + list(range(20)))
print("   B's Mamba table (block, tokens of its key):", blocks.table(1, b))
column = blocks.table(1, b)[1]
print(f"block {column[0]} is the private copy of the state after 14 tokens; its key says {column[1]}")
c = blocks.request("C", prompt[:16] + [7, 7, 7])
offered, hit = blocks.admit(c)
state = offered.blocks[1][-1].block_id
print(f"C is offered {hit} tokens, and for them the state in block {state}")
sys.exit(1 if (state, hit) == (column[0], 16) else 0)

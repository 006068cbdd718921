#!/usr/bin/env python3
"""vLLM 0.33.0, Mamba "align" mode, several modules of multi-token prediction, hits inside blocks: the
last state of a prompt gets its key a chunk late, when it has seen more tokens than the key says.

    python3 vllm_last_state_key.py        # with vLLM installed
"""

import sys

from vllm_blocks import Blocks, attention, mamba

BLOCK, MODULES, STEP = 16, 3, 8
blocks = Blocks(
    40, [attention(BLOCK), mamba(BLOCK, drafts=3)], hash_block=4, drop=True, modules=MODULES)
seen = {}  # by each Mamba block's state: how many tokens


def serve(name, tokens, free):
    """A prompt; of each step's tokens `free` are left beside another request's verification."""
    request = blocks.request(name, tokens)
    admitted = blocks.admit(request)
    done = hit = admitted[1]
    print(f"{name}: {len(tokens)} tokens, {hit} of them cached")
    begins = admitted[0].blocks[1][-1].block_id if hit else None
    while done < len(tokens):
        n = blocks.split(request, min(free, len(tokens) - done), hit if admitted else 0, STEP)
        rest = len(tokens) - done - n
        if 0 < rest < MODULES:
            n -= MODULES - rest  # Scheduler._reserve_prefill_lookahead
        blocks.run(request, n, admitted)
        admitted = None
        for source, target in blocks.end_step():
            seen[target] = seen.get(source)
        done += n
        block, key = blocks.table(1, request)[(done - 1) // BLOCK]
        seen[block] = done
        print(f"   tokens {done - n} to {done}: the state in block {block}, keyed for {key}")
    return request, begins


a, _ = serve("A", list(range(9)), 4)
for token in (50, 51):  # decoded, so that the keys of the whole prompt are there
    a.append_output_token_ids([token])
    blocks.run(a, 1)
    blocks.end_step()
blocks.manager.free(a)
_, state = serve("B", list(range(8)) + [7] * 6, 8)
if state is None:
    sys.exit(0)
print(f"B begins after 4 tokens with the state in block {state}, which has seen {seen[state]}")
sys.exit(seen[state] != 4)

#!/usr/bin/env python3
"""vLLM 0.33.0, a hybrid model with a KV connector: where tokens of another server and new ones are
allocated in one call, the need of a Mamba group says one block and two are popped.

    python3 vllm_external_tokens.py        # with vLLM installed
"""

import sys

from vllm_blocks import Blocks, attention, mamba

blocks = Blocks(7, [attention(4), mamba(4)], hash_block=4)
request = blocks.request("a", range(16))
found, _ = blocks.admit(request)[0], 0
pool = blocks.manager.block_pool
pool.get_new_blocks(1)  # another request has one block
print(f"{pool.get_num_free_blocks()} blocks are free")
print("8 tokens from another server and 8 new ones: 4 blocks of attention, Mamba's columns 1 and 3")
try:
    blocks.manager.allocate_slots(
        request, 8, num_new_computed_tokens=0, new_computed_blocks=found, num_external_computed_tokens=8
    )
except Exception as error:
    print(f"allocate_slots raises {type(error).__name__}: {error}")
    sys.exit(1)

#!/usr/bin/env python3
"""vLLM 0.33.0, hashes that look two tokens ahead (multi-token prediction with two modules) on a model of
sliding windows alone: a look-up asks for a hash that does not exist.

    python3 vllm_lookahead_window.py        # with vLLM installed
"""

import sys

from vllm_blocks import Blocks, window

blocks = Blocks(32, [window(4, 9)], hash_block=4, lookahead=2, modules=2)
request = blocks.request("a", range(9))
print(f"9 tokens, {len(request.block_hashes)} hash, two blocks to look for")
try:
    print("cached:", blocks.admit(request)[1])
except IndexError as error:
    print(f"get_computed_blocks raises IndexError: {error}")
    sys.exit(1)

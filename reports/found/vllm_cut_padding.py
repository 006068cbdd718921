#!/usr/bin/env python3
"""vLLM 0.33.0, speculative decoding: long_prefill_token_threshold cuts an admission that was padded with
drafts, and schedule() asserts that it was not.

    python3 vllm_cut_padding.py        # with vLLM installed
"""

import sys

from vllm_blocks import Request, SamplingParams, attention, hasher, scheduler, step

core = scheduler(64, [attention(4)], budget=64, drafts=2, threshold=2)


def add(name, tokens):
    core.add_request(
        Request(
            name, tokens, SamplingParams(max_tokens=9), None, arrival_time=0.0, block_hasher=hasher(4, 0)
        ))


add("decodes", list(range(9)))
number = 1
while core.requests["decodes"].num_computed_tokens < 9:
    print(f"step {number}", step(core))
    number += 1
add("second", list(range(9)))
try:
    print(f"step {number}", step(core))
except AssertionError as error:
    print(f"step {number} raises AssertionError:{error}")
    sys.exit(1)

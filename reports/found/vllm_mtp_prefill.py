#!/usr/bin/env python3
"""vLLM 0.33.0, multi-token prediction with several modules on a hybrid in "align" mode: a prefill that
never ends.

    python3 vllm_mtp_prefill.py        # with vLLM installed
"""

import sys

from vllm_blocks import Request, SamplingParams, attention, hasher, mamba, scheduler, step

core = scheduler(64, [attention(8), mamba(8, drafts=3)], budget=8, drafts=3, modules=3)
request = Request(
    "r", list(range(25)), SamplingParams(max_tokens=5), None, arrival_time=0.0, block_hasher=hasher(8, 3)
)
core.add_request(request)
for number in range(1, 9):
    print(f"step {number}", step(core), f"computed {request.num_computed_tokens} of 25")
sys.exit(1 if request.num_computed_tokens < 25 else 0)

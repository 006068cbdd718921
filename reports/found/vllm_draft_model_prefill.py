#!/usr/bin/env python3
"""vLLM 0.33.0, a draft model beside a hybrid in "align" mode: a prefill that never begins.

    python3 vllm_draft_model_prefill.py        # with vLLM installed
"""

import sys

from vllm_blocks import Request, SamplingParams, attention, hasher, mamba, scheduler, step

core = scheduler(64, [attention(16), mamba(16, drafts=2)], budget=16, drafts=2, slots=1)
request = Request(
    "r", list(range(40)), SamplingParams(max_tokens=5), None, arrival_time=0.0, block_hasher=hasher(16)
)
core.add_request(request)
for number in range(1, 5):
    print(f"step {number}", step(core), f"computed {request.num_computed_tokens} of 40")
sys.exit(1 if request.num_computed_tokens == 0 else 0)

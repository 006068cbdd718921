#!/usr/bin/env python3
"""vLLM 0.33.0, speculative decoding of a hybrid: the first chunk of a one-token prompt is scheduled as a
verification.

    python3 vllm_padded_prompt.py        # with vLLM installed
"""

import sys

from vllm_blocks import Request, SamplingParams, attention, hasher, mamba, scheduler, step

core = scheduler(64, [attention(4), mamba(4, drafts=2)], budget=64, drafts=2, modules=1)


def add(name, tokens):
    core.add_request(
        Request(
            name, tokens, SamplingParams(max_tokens=9), None, arrival_time=0.0, block_hasher=hasher(4, 1)
        ))


add("decodes", list(range(9)))
for number in range(1, 4):
    print(f"step {number}", step(core))
add("one", [77])
computed = core.requests["one"].num_computed_tokens
output = core.schedule()
drafts = output.scheduled_spec_decode_tokens.get("one", [])
print(f"step 4 {output.num_scheduled_tokens}: `one` has computed {computed} tokens, drafts {drafts}")
sys.exit(1 if computed == 0 and drafts else 0)

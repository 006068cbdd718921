#!/usr/bin/env python3
"""vLLM 0.33.0, priority scheduling: a request that was scheduled in this step and is preempted later in it
leaves keys on blocks that nobody computes. Full attention alone.

    python3 vllm_priority_keys.py        # with vLLM installed
"""

import sys

from vllm_blocks import Request, SamplingParams, attention, hasher, scheduler, step

core = scheduler(9, [attention(4)], budget=12, policy="priority", must_fit=False, threshold=8)


def request(name, tokens, priority):
    parameters = SamplingParams(max_tokens=50)
    return Request(
        name, list(tokens), parameters, None, arrival_time=float(priority), block_hasher=hasher(4),
        priority=priority)


low, high = request("low", range(100, 140), 5), request("high", range(200, 204), 0)
core.add_request(low)
print("step 1", step(core))
core.add_request(high)
print("step 2", step(core))
computed = low.num_computed_tokens
print("step 3", step(core), f"; {low.request_id} is {low.status.name}")
twin = request("twin", range(100, 140), 1)
_, hit, _ = core.kv_cache_manager.get_computed_blocks(twin)
print(f"{computed} tokens of low were computed; a request with its prompt is offered {hit}")
sys.exit(1 if hit > computed else 0)

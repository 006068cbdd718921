#!/usr/bin/env python3
"""vLLM 0.33.0, Mamba "align" mode with speculative decoding: the next turn of a streaming session begins
after rejected drafts, and a block that none of its forwards ends in is keyed as a state.

    python3 vllm_session_state.py        # with vLLM installed
"""

import sys

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_blocks import attention, hasher, mamba, scheduler

BLOCK, DRAFTS, STOP = 4, 1, 99
core = scheduler(64, [attention(BLOCK), mamba(BLOCK, DRAFTS)], budget=64, drafts=DRAFTS)
states = core.kv_cache_manager.coordinator.single_type_managers[1]


def turn(tokens):
    """Input of the session; its answer ends with the token STOP."""
    parameters = SamplingParams(max_tokens=64, stop_token_ids=[STOP])
    core.add_request(Request("session", list(tokens), parameters, None, block_hasher=hasher(BLOCK), resumable=True))


def step(sampled, proposed=()):
    """schedule(), and a result of these tokens; then the drafts for the next step. Returns the tokens
    that are computed then: a state after so many exists."""
    request = core.requests["session"]
    begin = request.num_computed_tokens
    output = core.schedule()
    end = begin + output.num_scheduled_tokens["session"]
    result = [] if request.is_prefill_chunk else sampled
    core.update_from_output(output, ModelRunnerOutput(["session"], {"session": 0}, [result]))
    core.update_draft_token_ids(DraftTokenIds(["session"], [list(proposed)]))
    table = states.req_to_blocks["session"]
    print(f"tokens {begin} to {end}; Mamba table (block, tokens of its key):", end=" ")
    print([(b.block_id, b.block_hash_num_tokens if b.block_hash else 0) for b in table])
    return request.num_computed_tokens


first, second = list(range(100, 107)), list(range(200, 209))
turn(first)
ends = []
while not ends or ends[-1] < len(first):
    ends.append(step([7], proposed=[8]))
# A verification of one draft takes places 7 and 8, which lie in two blocks. The draft is rejected, and
# the answer ends.
ends.append(step([STOP]))
print(f"{ends[-1]} tokens are computed, and the session's next turn comes")
turn(second)
ends.append(step([7]))

keyed = {b.block_id: b.block_hash_num_tokens for b in states.req_to_blocks["session"] if b.block_hash}
wrong = {block: tokens for block, tokens in keyed.items() if tokens not in ends}
for block, tokens in wrong.items():
    print(f"block {block} is keyed for {tokens} tokens; states exist after {ends}")
prompt = [*first, 7, *second[:4], 1]
other = Request("other", prompt, SamplingParams(max_tokens=4), None, block_hasher=hasher(BLOCK))
blocks, hit, _ = core.kv_cache_manager.get_computed_blocks(other)
state = blocks.blocks[1][-1].block_id if hit else None
print(f"a request with this prefix is offered {hit} tokens, and for them the state in block {state}")
sys.exit(1 if wrong.get(state) == hit else 0)

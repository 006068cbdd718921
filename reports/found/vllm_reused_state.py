#!/usr/bin/env python3
"""vLLM 0.33.0, OffloadingConnector, a hybrid model in Mamba "align" mode with speculative decoding: the
store of a state begins a step after its block was given out again, and copies what the new owner wrote.

    python3 vllm_reused_state.py [--repaired]        # with vLLM installed
"""

import sys

from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm_blocks import attention, mamba
from vllm_offload import Engine

BLOCK, DRAFTS = 4, 3


def repair(connector):
    """The copy of a state that was there before this step lands before its forward, if the step has
    given the block out again."""
    build = connector._build_aligned_boundary_store_jobs

    def build_and_flush(handoffs):
        jobs = build(handoffs)
        for id, job in jobs.items():
            tokens = (max(job.src_spec.block_indices) + 1) * BLOCK
            was_there = tokens <= connector._req_status[job.req_id].req.num_computed_tokens
            if was_there and job.src_spec.block_ids[0] in connector._current_batch_allocated_block_ids:
                connector._current_batch_jobs_to_flush.add(id)
        return jobs

    connector._build_aligned_boundary_store_jobs = build_and_flush


manager = CPUOffloadingManager(20)
engine = Engine(manager, [mamba(BLOCK, DRAFTS), attention(BLOCK)], BLOCK, blocks=13, drafts=DRAFTS)
core = engine.core
if "--repaired" in sys.argv:
    repair(core.connector.connector_scheduler)
request = engine.request("a", range(14), output=40)
wrong = 0
for _ in range(4):
    begin = request.num_computed_tokens
    output = core.schedule()
    meta = output.kv_connector_metadata
    new = output.scheduled_cached_reqs.new_block_ids or [None]
    new = {block for group in new[0] or () for block in group}
    print(f"tokens {begin} to {request.num_computed_tokens}; new blocks {sorted(new)}")
    for id, job in meta.store_jobs.items():
        block, tokens = int(job.src_spec.block_ids[0]), (max(job.src_spec.block_indices) + 1) * BLOCK
        if job.src_spec.group_sizes[0] == 0 or block not in new:
            continue
        flushed = id in (meta.jobs_to_flush or ())
        wrong += not flushed
        print(f"  the state of {tokens} tokens is copied from block {block}", end=" ")
        print("before this step's forward" if flushed else "when this step's forward has written there")
    is_decoding = request.num_computed_tokens >= 14
    drafts = output.scheduled_spec_decode_tokens.get("a", [])
    sampled = [[*drafts, 7]] if is_decoding else [[]]
    core.update_from_output(output, ModelRunnerOutput(["a"], {"a": 0}, sampled))
    if is_decoding:
        core.update_draft_token_ids(DraftTokenIds(["a"], [[8] * DRAFTS]))
sys.exit(1 if wrong else 0)

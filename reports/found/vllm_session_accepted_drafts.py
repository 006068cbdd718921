#!/usr/bin/env python3
"""vLLM 0.33.0, Mamba "align" mode with speculative decoding: the next turn of a streaming session begins with
the state before the drafts that its last verification kept.

    python3 vllm_session_accepted_drafts.py        # with vLLM installed

vLLM's Scheduler, and of its worker _update_states, InputBatch and preprocess_mamba. No model: a state is the
number of tokens that it has seen."""

import ctypes
import sys

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker import gpu_input_batch, mamba_utils

from vllm_blocks import attention, bag, cache_config, hasher, mamba, scheduler, worker

BLOCK, DRAFTS, BLOCKS, LENGTH, STOP = 16, 2, 64, 256, 99


class Buffer:
    """vLLM's CpuGpuBuffer without a GPU."""

    def __init__(self, size, dtype):
        self.np = np.zeros(size, np.int64)

    def copy_to_gpu(self, count):
        return self.np[:count].tolist()


def copy(sources, targets, sizes):
    """batch_memcpy, in place of its kernel."""
    for source, target, size in zip(sources, targets, sizes):
        ctypes.memmove(target, source, size)


class Session:
    """One session, its scheduler and its worker."""

    def __init__(self):
        specs = [attention(BLOCK), mamba(BLOCK, DRAFTS)]
        self.core = scheduler(BLOCKS, specs, budget=64, drafts=DRAFTS)
        self.groups = cache_config(BLOCKS, specs)
        self.states = torch.zeros(BLOCKS, 4)
        self.layers = {"layer1": bag(kv_cache=[self.states])}
        self.copies = {specs[1].mamba_type: (mamba_utils.get_temporal_copy_spec,)}
        self.buffers = mamba_utils.MambaCopyBuffers.create(4, self.groups, self.copies, Buffer)
        columns = LENGTH // BLOCK + DRAFTS
        self.batch = gpu_input_batch.InputBatch(
            4, LENGTH, LENGTH, torch.device("cpu"), 1000, [BLOCK] * 2, [columns] * 2)
        self.worker = worker(self.batch)
        self.columns = {}

    def turn(self, tokens):
        parameters = SamplingParams(max_tokens=64, stop_token_ids=[STOP])
        self.core.add_request(Request("s", list(tokens), parameters, None, block_hasher=hasher(BLOCK), resumable=True))

    def step(self, sampled, drafts=()):
        """One step with this result, then these drafts. Returns the tokens computed before it, and those
        that the state has seen with which its forward begins."""
        output = self.core.schedule()
        count = output.num_scheduled_tokens["s"]
        verified = len(output.scheduled_spec_decode_tokens.get("s", ()))
        self.worker.update_states(output)
        request = self.worker.requests["s"]
        begin = request.num_computed_tokens
        mamba_utils.preprocess_mamba(
            output, self.groups, bag(enable_prefix_caching=True), self.columns, self.batch, self.worker.requests,
            self.layers, self.copies, self.buffers)
        # The forward. A verification reads the state that num_accepted_tokens chooses, another row the
        # first one; a verification leaves a state after each of its tokens, another row one.
        table, column = request.block_ids[1], self.columns["s"]
        accepted = int(self.batch.num_accepted_tokens_cpu[0]) if verified else 1
        seen = int(self.states[table[column + accepted - 1], 0]) if begin else 0
        for place in range(1 + verified):
            self.states[table[column + place]] = seen + count - verified + place
        # _update_states_after_model_execute, by the rule of postprocess_mamba_fused_kernel, which keeps the
        # state of a block's end; then the tokens, as sample_tokens does.
        kept = max(len(sampled), 1)
        running = begin + count - verified
        end = (running + kept - 1) // BLOCK * BLOCK
        if end >= running:
            self.states[table[end // BLOCK - 1]] = self.states[table[column + end - running]]
            kept = 1 if end // BLOCK - 1 == column else kept
        self.batch.num_accepted_tokens_cpu[0] = kept
        request.output_token_ids.extend(sampled)
        self.core.update_from_output(output, ModelRunnerOutput(["s"], {"s": 0}, [list(sampled)]))
        self.core.update_draft_token_ids(DraftTokenIds(["s"], [list(drafts)]))
        what = f"a verification of {verified} drafts" if verified else "a chunk"
        print(f"  tokens {begin} to {begin + count}, {what}: begins with the state after {seen} tokens")
        return begin, seen


mamba_utils.batch_memcpy = copy
wrong = []
for title, prompt, last, tokens in (
    ("the last verification keeps no draft", 3, [STOP], 4),
    ("the last verification keeps both drafts", 3, [8, 9, STOP], 4),
    ("it keeps one and ends at a block's end, and the next turn is long", 11, [8, STOP], 40)):
    print(title)
    session = Session()
    session.turn(range(100, 100 + prompt))
    session.step([1], drafts=[4, 5])
    session.step([4, 5, 6], drafts=[8, 9])
    session.step(last)
    session.turn(range(200, 200 + tokens))
    begin, seen = session.step([7])
    if seen != begin:
        wrong.append(f"a turn computes tokens from {begin} on with a state that has seen {seen}")
print(*wrong, sep="\n")
sys.exit(1 if wrong else 0)

#!/usr/bin/env python3
"""vLLM 0.33.0, `--use-replayssm`: a running request that one step leaves out, and the next turn of a streaming
session, begin with the state without what is pending in the ring.

    python3 vllm_replay_rested_row.py        # with vLLM installed

vLLM's Scheduler, and of its worker _update_states, InputBatch and the metadata builder of Mamba2. No model: a
state is the number of tokens that it has seen, and a step that is told to write it adds to that number the
entries that it is told to read, and its tokens."""

import sys

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import InputBatch

from vllm_blocks import attention, bag, hasher, mamba, scheduler, worker

BLOCK, RING, BLOCKS, LENGTH, STOP = 64, 16, 64, 256, 99


def builder():
    made = object.__new__(Mamba2AttentionMetadataBuilder)
    made.__dict__.update(
        reorder_batch_threshold=1,
        num_spec_tokens=0,
        use_spec_decode=False,
        needs_causal_conv1d_metadata=False,
        use_replayssm=True,
        use_flashinfer_replayssm=False,
        replayssm_buffer_len=RING,
        decode_bc_pre_scratch=None,
        metadata_cls=BaseMambaAttentionMetadata,
        kv_cache_spec=mamba(BLOCK),
        vllm_config=bag(
            "speculative_config", cache_config=bag(mamba_cache_mode="align"),
            scheduler_config=bag(async_scheduling=False)),
        _update_metadata_for_cudagraph_capture=lambda metadata: metadata)
    return made


class Server:
    """A scheduler and its worker."""

    def __init__(self):
        self.core = scheduler(BLOCKS, [attention(BLOCK), mamba(BLOCK)], budget=64)
        self.batch = InputBatch(
            4, LENGTH, LENGTH, torch.device("cpu"), 1000, [BLOCK] * 2, [LENGTH // BLOCK] * 2, use_replayssm=True)
        self.worker, self.builder = worker(self.batch), builder()
        self.seen = {}  # by request: tokens that its state has seen
        self.wrong = []

    def add(self, name, tokens, resumable=False):
        parameters = SamplingParams(max_tokens=64, stop_token_ids=[STOP])
        self.core.add_request(
            Request(name, list(tokens), parameters, None, block_hasher=hasher(BLOCK), resumable=resumable))

    def step(self, **sampled):
        output = self.core.schedule()
        self.worker.update_states(output)
        counts = output.num_scheduled_tokens
        for name in counts:
            self.row(name, counts[name])
        ids = list(counts)
        if not ids:
            return print("  an empty step")
        results = [[sampled.get(name, 7)] for name in ids]
        for name, result in zip(ids, results):
            self.worker.requests[name].output_token_ids.extend(result)
        self.core.update_from_output(output, ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, results))

    def row(self, name, count):
        place = self.batch.req_id_to_index[name]
        begin = int(self.batch.num_computed_tokens_cpu[place])
        told = self.told(place, begin, count)
        entries, writes = 0, True
        if told.num_decodes:
            entries, writes = int(told.write_pos_d[0]), bool(told.is_flush_d[0])
        seen = self.seen.get(name, 0)
        if seen + entries != begin:
            self.wrong.append(f"`{name}` computes tokens from {begin} on with a state that has seen {seen + entries}")
            print(f"  `{name}`, tokens {begin} to {begin + count}: the state after {seen} tokens, {entries} of the ring")
        if writes:
            self.seen[name] = seen + entries + count

    def told(self, place, begin, count):
        ends = torch.tensor([0, count])
        return self.builder._compute_common_metadata(
            CommonAttentionMetadata(
                query_start_loc=ends, query_start_loc_cpu=ends, seq_lens=torch.tensor([begin + count]), num_reqs=1,
                num_actual_tokens=count, max_query_len=count, max_seq_len=begin + count,
                block_table_tensor=torch.ones(1, LENGTH // BLOCK, dtype=torch.int32), slot_mapping=torch.zeros(count),
                is_prefilling=torch.tensor([begin < int(self.batch.num_prompt_tokens[place])]),
                seq_lens_cpu_upper_bound=torch.tensor([begin + count], dtype=torch.int32),
                replayssm_decode_base_cpu=self.batch.replayssm_decode_base_cpu_tensor[place : place + 1]))


def paused():
    """The server is paused with mode=keep in the step that ends another request, and resumed."""
    server = Server()
    server.add("stays", range(100, 110))
    server.add("ends", range(200, 210))
    for _ in range(6):
        server.step()
    server.step(ends=STOP)
    server.core.set_pause_state(PauseState.PAUSED_ALL)
    while server.core.has_requests():  # as EngineCore.step() asks
        server.step()
    server.core.set_pause_state(PauseState.UNPAUSED)
    for _ in range(3):
        server.step()
    return server.wrong


def turned():
    """A session's next turn."""
    server = Server()
    server.add("session", range(100, 110), resumable=True)
    for _ in range(6):
        server.step()
    server.step(session=STOP)
    server.add("session", range(200, 204), resumable=True)
    server.step()
    return server.wrong


wrong = []
for title, play in (("a pause", paused), ("a turn", turned)):
    print(title)
    wrong += play()[:1]
print(*wrong, sep="\n")
sys.exit(1 if wrong else 0)

"""vLLM 0.33.0's KVCacheManager and Scheduler in small: what the scripts vllm_*.py beside this file share.
Needs vLLM's classes alone, no GPU and no model: nothing is computed, and what a forward would have
written follows from the chunks that vLLM schedules."""

import __future__

import ast
import importlib.util
import logging
import types

import torch
import vllm.v1.core.kv_cache_utils as utils
from vllm.sampling_params import SamplingParams, SamplingType
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.worker.gpu_input_batch import CachedRequestState

logging.disable(logging.WARNING)
register_all_kvcache_specs(None)
utils.init_none_hash(lambda value: b"none".rjust(32))
numbers = {}
LONG = 1 << 20


def hash_value(value):
    return numbers.setdefault(value, (len(numbers) + 1).to_bytes(32, "big"))


def bag(names="", **values):
    """An object with these attributes; those of `names` are None."""
    return types.SimpleNamespace(**dict.fromkeys(names.split()), **values)


def attention(block):
    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float16)


def window(block, tokens):
    return SlidingWindowSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float16, sliding_window=tokens)


def mamba(block, drafts=0, checkpoints=0):
    return MambaSpec(
        block_size=block, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align",
        num_speculative_blocks=drafts, num_prefill_checkpoint_blocks=checkpoints,
        prefill_checkpoint_alignment=1 if checkpoints else None)


def cache_config(blocks, specs, retention=None):
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(blocks, [], groups, prefix_cache_retention_interval=retention)


class Blocks:
    """A KVCacheManager, driven as the scheduler drives it."""

    def __init__(self, blocks, specs, hash_block, retention=None, drop=False, lookahead=0, modules=0):
        self.specs, self.hash_block, self.drop, self.lookahead = specs, hash_block, drop, lookahead
        self.block = specs[-1].block_size
        self.manager = KVCacheManager(
            cache_config(blocks, specs, retention), max_model_len=LONG, scheduler_block_size=self.block,
            hash_block_size=hash_block, enable_caching=True, use_eagle=drop, num_hash_lookahead_tokens=lookahead,
            num_prefill_lookahead=modules)
        self.hasher = utils.get_request_block_hasher(hash_block, hash_value, lookahead)
        self.groups = self.manager.coordinator.single_type_managers

    def request(self, name, tokens):
        parameters = SamplingParams(max_tokens=LONG)
        return Request(name, list(tokens), parameters, None, arrival_time=0.0, block_hasher=self.hasher)

    def admit(self, request):
        """The look-up: blocks, and how many tokens they hold."""
        blocks, hit, junction = self.manager.get_computed_blocks(request)
        request.shared_prefix_boundary = junction
        return blocks, hit

    def split(self, request, tokens, hit=0, budget=64):
        """Scheduler._mamba_block_aligned_split."""
        checkpoints = getattr(self.specs[-1], "num_prefill_checkpoint_blocks", 0)
        scheduler = bag(
            cache_config=bag(block_size=self.block), block_size=self.block, hash_block_size=self.hash_block,
            mamba_partial_cache_hit=self.manager.coordinator.enable_partial_hash_hits, use_eagle_block_drop=self.drop,
            num_hash_lookahead_tokens=self.lookahead, mamba_has_prefill_checkpoint_blocks=checkpoints > 0,
            mamba_prefill_checkpoint_alignment=1 if checkpoints else None, max_num_scheduled_tokens=budget,
            scheduler_config=bag(long_prefill_token_threshold=0), mamba_shared_prefix_checkpoint=False)
        return Scheduler._mamba_block_aligned_split(scheduler, request, tokens, hit)

    def run(self, request, tokens, admitted=None):
        """One chunk; `admitted` is what admit() gave, for a request's first one."""
        blocks, hit = admitted or (None, 0)
        added = self.manager.allocate_slots(
            request, tokens, num_new_computed_tokens=hit, new_computed_blocks=blocks,
            full_sequence_must_fit=admitted is not None)
        assert added is not None, "the pool is too small"
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens += hit + tokens

    def end_step(self):
        """The step is decided: the copies that run before its forward, as (source, target)."""
        copies, kept = self.manager.take_kv_cache_block_copies()
        self.manager.block_pool.free_blocks(kept)
        self.manager.new_step_starts()
        return [(pair.src_block_id, pair.dst_block_id) for pair in copies or ()]

    def table(self, group, request):
        """Of each column: the block, and how many tokens its key stands for."""
        table = self.groups[group].req_to_blocks[request.request_id]
        return [(b.block_id, b.block_hash_num_tokens if b.block_hash else 0) for b in table]


def scheduler(blocks, specs, budget, policy="fcfs", drafts=0, modules=0, must_fit=True, threshold=0, slots=0,
              transfer=None, hash_block=0):
    """A Scheduler; its configuration as far as it reads it. slots: of a draft model, for each row.
    transfer: the kv_transfer_config. hash_block: 0 for the last group's block."""
    block = specs[-1].block_size
    config = bag(
        "lora_config kv_events_config ec_transfer_config",
        kv_transfer_config=transfer,
        speculative_config=None
        if not drafts
        else bag(
            "num_speculative_tokens_per_batch_size", max_num_new_slots_for_drafting=slots, use_eagle=lambda: slots == 0,
            use_eagle_block_drop=lambda: False, needs_eagle_block_drop=lambda: False, disable_eagle_block_drop=False),
        is_mm_encoder_only=False,
        max_concurrent_batches=1,
        max_in_flight_tokens=None,
        num_speculative_tokens=drafts,
        num_lookahead_tokens=drafts,
        num_prefill_lookahead_tokens=modules,
        num_hash_lookahead_tokens=modules,
        use_v2_model_runner=False,
        scheduler_config=bag(
            "max_num_active_seqs max_num_scheduled_tokens", max_num_seqs=4, max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold, long_prefill_token_threshold_adaptive=False, policy=policy,
            watermark=0.0, prefill_schedule_interval=1, scheduler_reserve_full_isl=must_fit,
            enable_chunked_prefill=True),
        cache_config=bag(
            num_gpu_blocks=blocks, enable_prefix_caching=True, mamba_cache_mode="align", block_size=block,
            enable_mamba_shared_prefix_checkpoint=False, prefix_cache_retention_interval=None),
        model_config=bag(
            uses_mrope=False, is_encoder_decoder=False, max_model_len=LONG, runner_type="generate", is_diffusion=False,
            supports_multimodal_inputs=False, return_sampling_mask=False),
        parallel_config=bag(
            data_parallel_index=0, decode_context_parallel_size=1, prefill_context_parallel_size=1,
            pipeline_parallel_size=1, data_parallel_size=1, world_size=1),
        observability_config=bag(
            per_request_spec_decode_metrics="none", kv_cache_metrics=False, enable_mfu_metrics=False,
            enable_logging_iteration_details=False),
        ec_manager_config=bag(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=bag(enabled=False))
    grammars = bag(accept_tokens=lambda *_: True, validate_tokens=lambda _, tokens: tokens)
    cache = cache_config(blocks, specs)
    return Scheduler(config, cache, grammars, block, hash_block or block, mm_registry=None)


def step(core, token=7):
    """schedule() and the result of its forward."""
    output = core.schedule()
    names = list(output.num_scheduled_tokens)
    sampled = [[] if core.requests[name].is_prefill_chunk else [token] for name in names]
    places = {name: i for i, name in enumerate(names)}
    core.update_from_output(output, ModelRunnerOutput(names, places, sampled))
    return dict(output.num_scheduled_tokens)


def hasher(block, lookahead=0):
    return utils.get_request_block_hasher(block, hash_value, lookahead)


def methods(*names):
    """These methods of GPUModelRunner, by themselves: importing their file takes a GPU's packages. They
    find here what a last pipeline rank with sampled tokens asks for."""
    path = importlib.util.find_spec("vllm.v1.worker.gpu_model_runner").origin
    with open(path) as source:
        tree = ast.parse(source.read())
    (runner,) = [node for node in tree.body if getattr(node, "name", "") == "GPUModelRunner"]
    chosen = [node for node in runner.body if getattr(node, "name", "") in names]
    found = {
        "get_pp_group": lambda: bag(is_last_rank=True),
        "SamplingType": SamplingType,
        "CachedRequestState": CachedRequestState,
        "length_from_prompt_token_ids_or_embeds": length_from_prompt_token_ids_or_embeds,
    }
    annotations = __future__.annotations.compiler_flag
    exec(compile(ast.Module(chosen, []), path, "exec", flags=annotations), found)
    return [found[name] for name in names]


def worker(batch):
    """GPUModelRunner's part that keeps this InputBatch: `requests`, and update_states(scheduler_output)."""
    update_states, update_streaming_request = methods("_update_states", "_update_streaming_request")
    nothing = lambda *_: None
    made = bag(
        "speculative_config", requests={}, num_prompt_logprobs={}, encoder_cache={},
        late_interaction_runner=bag(on_requests_finished=nothing, register_request=nothing), input_batch=batch,
        is_pooling_model=False, uses_mrope=False, use_async_scheduling=False, use_async_spec_decode=False,
        _process_encoder_cache_scheduler_output=nothing, _zero_block_ids=nothing, _may_reorder_batch=nothing,
        _on_request_state_removed=nothing)
    made._update_streaming_request = lambda *given: update_streaming_request(made, *given)
    made.update_states = lambda output: update_states(made, output)
    return made

"""SGLang 0.5.23's hybrid cache and batches on a CPU, for the scripts beside this one: its own pools,
tree, ScheduleBatch and SchedulerBatchResultProcessor. One layer, whose state and window are one
number each; the scripts write them in place of the forward.
"""

import array
import types

import torch

import sglang.srt.mem_cache.allocation as allocation
import sglang.srt.runtime_context as runtime
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

bag = types.SimpleNamespace
nothing = lambda *_, **__: None


def configure(extra_buffer, strip_thinking=False):
    """The configuration as far as these classes read it: interval 256, chunk 64."""
    mamba = bag(enable_mamba_extra_buffer=extra_buffer, enable_mamba_extra_buffer_lazy=False,
                mamba_track_interval=256, mamba_max_states_per_path=-1, enable_int8_mamba_checkpoint=False)
    runtime._CONTEXT._config_bags = {
        "exec": bag(mamba=mamba, features=bag(enable_encoder_swa_bounded_replay=False)),
        "serving": bag(strip_thinking_cache=strip_thinking, weight_version=None),
        "spec": bag(speculative_algorithm=None),
        "disagg": bag(disaggregation_mode="null", disaggregation_decode_enable_offload_kvcache=False,
                      disaggregation_decode_retraction_backup="none"),
        "memory": bag(enable_hisparse=False, hicache_host_memory_mode="cache", hicache_ratio=1,
                      radix_eviction_policy="lru"),
        "observability": bag(enable_metrics=False)}
    runtime._CONTEXT._server_args = bag(_mamba_cache_chunk_size=64)
    runtime.get_parallel()._stamp.update(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0)
    Req.is_dllm = lambda self: False
    Req.init_diffusion_llm = lambda self, config: setattr(self, "dllm_config", config)


def pool_of(states, layer, extra_buffer=False, overlap=False, **ring):
    """Four requests, and the states and windows of one layer."""
    shape = bag(conv=[(1, 1)], temporal=(1, 1, 1), num_k_heads_per_tp=1)
    dtype = bag(conv=torch.float32, temporal=torch.float32)
    return HybridReqToTokenPool(
        size=4, mamba_size=states, mamba_spec_state_size=0, max_context_len=2048, device="cpu",
        enable_memory_saver=False, cache_params=bag(shape=shape, dtype=dtype, layers=[layer], is_kda=False),
        mamba_layer_ids=[layer], enable_mamba_extra_buffer=extra_buffer, enable_overlap_schedule=overlap, **ring)


def states_of(pool):
    """The states by slot."""
    return pool.mamba_pool.mamba_cache.temporal[0, :, 0, 0, 0]


def tree_parameters(pool, kv, parts=(ComponentType.FULL, ComponentType.MAMBA), extra_buffer=False, **more):
    return CacheInitParams(disable=False, req_to_token_pool=pool, token_to_kv_pool_allocator=kv, page_size=1,
                           enable_mamba_extra_buffer=extra_buffer, tree_components=parts,
                           tree_core_backend="python", **more)


def sampling(most_tokens):
    return bag(max_new_tokens=most_tokens, ignore_eos=False, custom_params=None, stop_strs=[],
               stop_regex_strs=[], stop_token_ids=None)


class Server:
    """Pools, tree and batches of one request. `ring` has fields of a replay ring."""

    def __init__(self, extra_buffer, overlap, kv_tokens=2048, strip_thinking=False, **ring):
        configure(extra_buffer, strip_thinking)
        allocation.attention_backends = lambda: ("torch_native", "torch_native")
        schedule_batch.SamplingBatchInfo = bag(
            from_schedule_batch=lambda *_: bag(penalizer_orchestrator=bag(is_required=False)))
        torch.Tensor.pin_memory = lambda self, *_, **__: self
        batch_result_processor.get_server_return_hidden_states_mode = (
            lambda: schedule_batch.CaptureHiddenMode.NULL)
        self.overlap = overlap
        self.pool = pool_of(16, 0, extra_buffer, overlap, **ring)
        self.state = states_of(self.pool)
        memory = bag(device="cpu", page_size=1, dtype=torch.float32)
        self.kv = TokenToKVPoolAllocator(kv_tokens, torch.float32, "cpu", memory, False)
        self.tree = UnifiedRadixCache(tree_parameters(
            self.pool, self.kv, extra_buffer=extra_buffer, enable_mamba_extra_buffer_lazy=False))
        self.model = bag(hf_text_config=bag(mamba_chunk_size=64), vocab_size=1 << 40, is_encoder_decoder=False,
                         think_end_ids=None, self_opened_think_start_ids=None)

    def batch_of(self, req, length):
        """The batch of a prefill of the request's first tokens."""
        req.init_next_round_input(self.tree)
        req.lock = self.tree.lock(req.last_node)
        req.extend_end = length
        batch = ScheduleBatch.init_new([req], self.pool, self.kv, self.tree, self.model, True,
                                       bag(is_none=lambda: True))
        batch.prepare_for_extend()
        return batch

    def processor(self, kind=batch_result_processor.SchedulerBatchResultProcessor):
        """What processes the results of batches."""
        reporter = bag(num_generated_tokens=0, forward_ct_decode=0, report_decode_stats=nothing)
        return kind(is_generation=True, disaggregation_mode=None, enable_overlap=self.overlap,
                    enable_overlap_mlx=False, model_config=self.model, token_to_kv_pool_allocator=self.kv,
                    tree_cache=self.tree, hisparse_coordinator=None, req_to_token_pool=self.pool,
                    decode_offload_manager=None, metrics_collector=None, metrics_reporter=reporter,
                    draft_worker=None, model_worker=None, logprob_result_processor=None,
                    output_streamer=bag(stream_output=nothing),
                    beam_coordinator=bag(commit_decode=lambda _: set()), abort_request=None)

    def stored_states(self):
        """The slot of each state in the tree, with the length of its key."""
        left = [(self.tree.tree_core.root_node, 0)]
        while left:
            node, depth = left.pop()
            for child in node.children.values():
                left.append((child, depth + len(child.key)))
                slot = child.component_data[ComponentType.MAMBA].value
                if slot is not None:
                    yield int(slot), depth + len(child.key)


def request(name, tokens):
    return Req(name, "", array.array("q", tokens), sampling(4096))


def process(processor, batch, kind):
    """The result of a batch of one request: its next token."""
    outcome = bag(
        copy_done=None, next_token_ids=torch.tensor([1000 + len(batch.reqs[0].output_ids)]), logits_output=None,
        auxiliary_host_output=None, routed_experts_output=None, indexer_topk_output=None,
        extend_input_len_per_req=None, extend_logprob_start_len_per_req=None, can_run_cuda_graph=False,
        num_correct_drafts_per_req_cpu=None, get_num_generated_tokens=lambda size: size)
    getattr(processor, "process_batch_result_" + kind)(batch, outcome)

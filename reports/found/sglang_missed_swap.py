#!/usr/bin/env python3
"""SGLang 0.5.23, extra_buffer with overlap: a request that stops by a token gives the prefix cache
a state of more tokens than its key.

Needs SGLang's classes alone, and no GPU: the forward is replaced by writing the number of tokens
into the state, where ScheduleBatch says that the kernel writes. From the scheduler's loop only the
order of launches and results is taken.

    python3 sglang_missed_swap.py              # with SGLang installed
    python3 sglang_missed_swap.py --repaired   # the swap is made at the launch
"""

import array
import sys
import types

import torch

import sglang.srt.mem_cache.allocation as allocation
import sglang.srt.runtime_context as runtime
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN, Req, ScheduleBatch
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

bag = types.SimpleNamespace
repaired = "--repaired" in sys.argv

# --- The configuration, as far as these classes read it: extra_buffer, interval 256, chunk 64 -----
mamba = bag(
    enable_mamba_extra_buffer=True,
    enable_mamba_extra_buffer_lazy=False,
    mamba_track_interval=256,
    mamba_max_states_per_path=-1,
    enable_int8_mamba_checkpoint=False,
)
runtime._CONTEXT._config_bags = {
    "exec": bag(mamba=mamba, features=bag(enable_encoder_swa_bounded_replay=False)),
    "serving": bag(strip_thinking_cache=False),
    "spec": bag(speculative_algorithm=None),
    "disagg": bag(disaggregation_mode="null", disaggregation_decode_enable_offload_kvcache=False),
    "memory": bag(enable_hisparse=False, hicache_host_memory_mode="cache"),
    "observability": bag(enable_metrics=False),
}
runtime._CONTEXT._server_args = bag(_mamba_cache_chunk_size=64)
runtime.get_parallel()._stamp.update(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0)
allocation.attention_backends = lambda: ("torch_native", "torch_native")
sampling = bag(penalizer_orchestrator=bag(is_required=False))
schedule_batch.SamplingBatchInfo = bag(from_schedule_batch=lambda *_: sampling)
torch.Tensor.pin_memory = lambda self, *_, **__: self
batch_result_processor.get_server_return_hidden_states_mode = (
    lambda: schedule_batch.CaptureHiddenMode.NULL
)

# --- SGLang's pools and tree: one layer whose state is one number ---------------------------------
shape = bag(conv=[(1, 1)], temporal=(1, 1, 1))
dtype = bag(conv=torch.float32, temporal=torch.float32)
pool = HybridReqToTokenPool(
    size=4,
    mamba_size=16,
    mamba_spec_state_size=0,
    max_context_len=2048,
    device="cpu",
    enable_memory_saver=False,
    cache_params=bag(shape=shape, dtype=dtype, layers=[0], is_kda=False),
    mamba_layer_ids=[0],
    enable_mamba_extra_buffer=True,
    enable_overlap_schedule=True,
)
state = pool.mamba_pool.mamba_cache.temporal[0, :, 0, 0, 0]  # [slots]
kv = TokenToKVPoolAllocator(
    2048, torch.float32, "cpu", bag(device="cpu", page_size=1, dtype=torch.float32), False
)
tree = UnifiedRadixCache(
    CacheInitParams(
        disable=False,
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=kv,
        page_size=1,
        enable_mamba_extra_buffer=True,
        enable_mamba_extra_buffer_lazy=False,
        tree_components=(ComponentType.FULL, ComponentType.MAMBA),
        tree_core_backend="python",
    )
)
model = bag(
    hf_text_config=bag(mamba_chunk_size=64),
    vocab_size=1 << 40,
    is_encoder_decoder=False,
    think_end_ids=None,
    self_opened_think_start_ids=None,
)
nothing = lambda *_, **__: None
parts = dict(
    is_generation=True,
    disaggregation_mode=None,
    enable_overlap=True,
    enable_overlap_mlx=False,
    model_config=model,
    token_to_kv_pool_allocator=kv,
    tree_cache=tree,
    hisparse_coordinator=None,
    req_to_token_pool=pool,
    decode_offload_manager=None,
    metrics_collector=None,
    metrics_reporter=bag(num_generated_tokens=0, forward_ct_decode=0, report_decode_stats=nothing),
    draft_worker=None,
    model_worker=None,
    logprob_result_processor=None,
    output_streamer=bag(stream_output=nothing),
    beam_coordinator=bag(commit_decode=lambda _: set()),
    abort_request=None,
)


class Repaired(batch_result_processor.SchedulerBatchResultProcessor):
    def _mamba_prefix_cache_update(self, *_, **__):
        """The swap was made at the launch."""


kind = Repaired if repaired else batch_result_processor.SchedulerBatchResultProcessor
processor = kind(**parts)


def forward(batch):
    """The kernel: the running state, and where the batch says so a copy of it aside."""
    for row, req in enumerate(batch.reqs):
        size = int(batch.seq_lens_cpu[row])
        state[int(req.kv.mamba_pool_idx)] = size
        if bool(batch.mamba_track_mask[row]):
            at = size if batch.forward_mode.is_decode() else req.kv.mamba_last_track_seqlen
            state[int(batch.mamba_track_indices[row])] = at
            if repaired and batch.forward_mode.is_decode():
                req.kv.mamba_next_track_idx = 1 - batch.mamba_track_buffer_indices[row]


def result(batch, kind):
    outcome = bag(
        copy_done=None,
        next_token_ids=torch.tensor([1000 + len(req.output_ids)]),
        logits_output=None,
        auxiliary_host_output=None,
        routed_experts_output=None,
        indexer_topk_output=None,
        extend_input_len_per_req=None,
        extend_logprob_start_len_per_req=None,
        can_run_cuda_graph=False,
        num_correct_drafts_per_req_cpu=None,
        get_num_generated_tokens=lambda size: size,
    )
    getattr(processor, "process_batch_result_" + kind)(batch, outcome)


# --- A prompt of 255 tokens: the first decode step makes 256, the first boundary -----------------
Req.is_dllm = lambda self: False
Req.init_diffusion_llm = lambda self, config: setattr(self, "dllm_config", config)
parameters = bag(
    max_new_tokens=4096,
    ignore_eos=False,
    custom_params=None,
    stop_strs=[],
    stop_regex_strs=[],
    stop_token_ids=None,
)
req = Req("r", "", array.array("q", range(1, 256)), parameters)
req.init_next_round_input(tree)
req.lock = tree.lock(req.last_node)
req.extend_end = 255
no_drafts = bag(is_none=lambda: True)
batch = ScheduleBatch.init_new([req], pool, kv, tree, model, True, no_drafts)
batch.prepare_for_extend()
forward(batch)
launched = [(batch.copy(), "prefill")]
# event_loop_overlap: a step is launched, then the result of the step before it is processed.
while True:
    batch.prepare_for_decode()
    forward(batch)
    launched.append((batch.copy(), "decode"))
    before, phase = launched.pop(0)
    if len(req.output_ids) == 256:  # the token that this result brings is a stop token
        req.to_finish = FINISH_MATCHED_TOKEN(matched=0)
        result(before, phase)
        break
    result(before, phase)

print(f"the request stopped with {len(req.origin_input_ids) + len(req.output_ids) - 1} tokens")
left, wrong = [(tree.tree_core.root_node, 0)], False
while left:
    node, depth = left.pop()
    for child in node.children.values():
        end = depth + len(child.key)
        left.append((child, end))
        slot = child.component_data[ComponentType.MAMBA].value
        if slot is not None:
            size = int(state[int(slot)])
            wrong |= size != end
            print(f"the tree has a state of {size} tokens on a key of {end}")
sys.exit(1 if wrong else 0)

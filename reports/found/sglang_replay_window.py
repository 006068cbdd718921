#!/usr/bin/env python3
"""SGLang 0.5.23, --enable-linear-replayssm with the prefix cache: an answer that ends while entries
of the replay ring are pending gives the cache a convolution window of more tokens than its key.

Needs SGLang's classes alone, and no GPU: the forward is replaced by writing the number of tokens
into the state and the window, where the kernels write them. The rule of the ring's cursor is that
of _forward_metadata (hybrid_linear_attn_backend.py), written again here.

    python3 sglang_replay_window.py              # with SGLang installed
    python3 sglang_replay_window.py --repaired   # an answer that ends between two flushes leaves nothing
"""

import array
import sys
import types

import torch

import sglang.srt.mem_cache.allocation as allocation
import sglang.srt.mem_cache.common as common
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

# --- The configuration, as far as these classes read it: no_buffer, interval 256, ring 16 --------
mamba = bag(
    enable_mamba_extra_buffer=False,
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

# --- SGLang's pools and tree: one layer whose state and window are one number each ----------------
shape = bag(conv=[(1, 1)], temporal=(1, 1, 1), num_k_heads_per_tp=1)
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
    enable_mamba_extra_buffer=False,
    enable_overlap_schedule=False,
    enable_linear_replayssm=True,
    linear_replayssm_cache_len=16,
)
state = pool.mamba_pool.mamba_cache.temporal[0, :, 0, 0, 0]  # [slots]
window = pool.mamba_pool.mamba_cache.conv[0][0, :, 0, 0]  # [slots]
cursor = pool.mamba_pool.replayssm_write_pos  # [slots]
kv = TokenToKVPoolAllocator(
    2048, torch.float32, "cpu", bag(device="cpu", page_size=1, dtype=torch.float32), False
)
tree = UnifiedRadixCache(
    CacheInitParams(
        disable=False,
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=kv,
        page_size=1,
        enable_mamba_extra_buffer=False,
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
    enable_overlap=False,
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


processor = batch_result_processor.SchedulerBatchResultProcessor(**parts)
release = common.release_kv_cache


def release_repaired(req, tree_cache, *, checkpoint):
    """Nothing is stored of a request whose ring is pending."""
    pending = int(cursor[int(req.kv.mamba_pool_idx)])
    release(req, tree_cache, checkpoint=checkpoint and pending == 0)


if repaired:
    for module in (common, schedule_batch, batch_result_processor):
        module.release_kv_cache = release_repaired


def forward(batch):
    """The kernels: every token shifts the convolution's window; a decode step writes the state where
    the ring is full or the length is on the track interval."""
    for row, req in enumerate(batch.reqs):
        size, slot = int(batch.seq_lens_cpu[row]), int(req.kv.mamba_pool_idx)
        window[slot] = size
        if not batch.forward_mode.is_decode():
            state[slot] = size
        elif int(cursor[slot]) == 15 or size % 256 == 0:
            state[slot], cursor[slot] = size, 0
        else:
            cursor[slot] += 1


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
result(batch, "prefill")
while True:
    batch.prepare_for_decode()
    forward(batch)
    stops = len(req.output_ids) == 40  # the token that this result brings is a stop token
    if stops:
        req.to_finish = FINISH_MATCHED_TOKEN(matched=0)
    result(batch, "decode")
    if stops:
        break

known = list(req.origin_input_ids) + list(req.output_ids)
print(f"the request stopped with {len(known) - 1} tokens")
left, wrong = [(tree.tree_core.root_node, 0)], False
while left:
    node, depth = left.pop()
    for child in node.children.values():
        end = depth + len(child.key)
        left.append((child, end))
        slot = child.component_data[ComponentType.MAMBA].value
        if slot is not None:
            seen = int(state[int(slot)]), int(window[int(slot)])
            wrong |= seen != (end, end)
            print(f"the tree has a state of {seen[0]} and a window of {seen[1]} on a key of {end}")

# --- The next turn of the conversation -----------------------------------------------------------
turn = Req("next", "", array.array("q", known + [7] * 20), parameters)
turn.init_next_round_input(tree)
source = turn.kv.mamba_cow_src_index
if source is not None:
    seen = int(state[int(source)]), int(window[int(source)])
    print(f"the next turn hits {turn.prefix_len}, a state of {seen[0]} and a window of {seen[1]}")
sys.exit(1 if wrong else 0)

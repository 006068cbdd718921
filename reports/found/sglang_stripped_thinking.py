#!/usr/bin/env python3
"""SGLang 0.5.23 with --strip-thinking-cache: a request that was retracted and resumed frees KV that
belongs to the prefix cache.

Needs SGLang's classes alone, and no GPU: nothing is computed.

    python3 sglang_stripped_thinking.py                  # with SGLang installed: extra_buffer
    python3 sglang_stripped_thinking.py --no-buffer      # the assertion that ends the scheduler
    python3 sglang_stripped_thinking.py --repaired       # with the proposed repair
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
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

bag = types.SimpleNamespace
repaired, extra_buffer = "--repaired" in sys.argv, "--no-buffer" not in sys.argv

# --- The configuration, as far as these classes read it ------------------------------------
mamba = bag(
    enable_mamba_extra_buffer=extra_buffer,
    enable_mamba_extra_buffer_lazy=False,
    mamba_track_interval=256,
    mamba_max_states_per_path=-1,
    enable_int8_mamba_checkpoint=False,
)
runtime._CONTEXT._config_bags = {
    "exec": bag(mamba=mamba, features=bag(enable_encoder_swa_bounded_replay=False)),
    "serving": bag(strip_thinking_cache=True),
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

# --- SGLang's pools and tree-------------------------------------------------------------------
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
    enable_mamba_extra_buffer=extra_buffer,
    enable_overlap_schedule=True,
)
state = pool.mamba_pool.mamba_cache.temporal[0, :, 0, 0, 0]  # [slots]
kv = TokenToKVPoolAllocator(
    1024, torch.float32, "cpu", bag(device="cpu", page_size=1, dtype=torch.float32), False
)
tree = UnifiedRadixCache(
    CacheInitParams(
        disable=False,
        req_to_token_pool=pool,
        token_to_kv_pool_allocator=kv,
        page_size=1,
        enable_mamba_extra_buffer=extra_buffer,
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


def release_repaired(req, tree_cache, *, checkpoint):
    """What the tree owns is never given back, and nothing is stored below it. A state that stands
    for more tokens than the key is not stored at all."""
    kept = req.owned_kv_len()
    owned = max(kept, req.kv.cache_protected_len)
    live_state = tree_cache.supports_mamba() and req.kv.mamba_ping_pong_track_buffer is None
    req.owned_kv_len = lambda: owned
    fits = owned == kept and not (live_state and kept != req.kv.kv_committed_len)
    release_as_shipped(req, tree_cache, checkpoint=checkpoint and fits)


release_as_shipped = common.release_kv_cache
release_kv_cache = release_repaired if repaired else release_as_shipped

# --- A request with a prompt of 100 tokens, retracted after 60 more, is resumed -------------------
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
req = Req("thinker", "", array.array("q", range(1, 101)), parameters)
req.output_ids = array.array("q", range(1001, 1061))  # what it had when it was retracted
req.reasoning_tokens = 60
req.init_next_round_input(tree)
req.lock = tree.lock(req.last_node)
req.extend_end = 160
no_drafts = bag(is_none=lambda: True)
batch = ScheduleBatch.init_new([req], pool, kv, tree, model, True, no_drafts)
batch.prepare_for_extend()
req.output_ids.append(1061)
common.checkpoint_kv_cache(req, tree)
print(f"resumed: the tree owns {req.kv.cache_protected_len} of {req.kv.kv_committed_len} tokens")
for token in range(20):
    batch.prepare_for_decode()
    req.output_ids.append(1062 + token)
req.to_finish = FINISH_MATCHED_TOKEN(matched=0)
req.update_finish_state()
try:
    release_kv_cache(req, tree, checkpoint=True)
except AssertionError as error:
    sys.exit(f"the scheduler dies: AssertionError: {error}")

in_tree, left = set(), [tree.tree_core.root_node]
while left:
    node = left.pop()
    left.extend(node.children.values())
    if node is not tree.tree_core.root_node:
        in_tree.update(node.component_data[ComponentType.FULL].value.tolist())
both = in_tree & set(kv.free_pages.tolist())
print(f"{len(in_tree)} KV slots in the tree, {kv.available_size()} free, of 1024")
print(f"{len(both)} are both free and in the tree")
sys.exit(1 if both else 0)

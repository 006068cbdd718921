"""SGLang 0.5.23's hybrid tree with a host tier, on a CPU: its own pools, tree, HybridCacheController
and scheduler's classes, for the scripts beside this one. A state is the number of tokens that it
stands for; a cleared slot is 0. Copies are done at once: those to the host are nothing but their
lists of free slots, and a load writes the state that the host has.
"""

import types

import torch

import sglang.srt.managers.cache_controller as controllers
import sglang.srt.mem_cache.allocation as allocation
import sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller as hybrid
import sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler as assembler
import sglang.srt.mem_cache.pool_host.base as host_base
import sglang.srt.runtime_context as runtime
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

bag = types.SimpleNamespace
FULL, MAMBA = ComponentType.FULL, ComponentType.MAMBA

# --- The configuration, as far as these classes read it: no_buffer, write_through ----------------
mamba = bag(
    enable_mamba_extra_buffer=False,
    enable_mamba_extra_buffer_lazy=False,
    mamba_track_interval=256,
    mamba_max_states_per_path=-1,
    enable_int8_mamba_checkpoint=False,
)
runtime._CONTEXT._config_bags = {
    "exec": bag(mamba=mamba, features=bag(enable_encoder_swa_bounded_replay=False)),
    "serving": bag(strip_thinking_cache=False, weight_version=None),
    "spec": bag(speculative_algorithm=None),
    "disagg": bag(
        disaggregation_mode="null",
        disaggregation_decode_enable_offload_kvcache=False,
        disaggregation_decode_retraction_backup="none",
    ),
    "memory": bag(
        enable_hisparse=False,
        hicache_host_memory_mode="cache",
        hicache_ratio=1,
        radix_eviction_policy="lru",
    ),
    "observability": bag(enable_metrics=False),
}
runtime._CONTEXT._server_args = bag(_mamba_cache_chunk_size=64)
runtime.get_parallel()._stamp.update(dcp_enabled=False, attn_dcp_size=1, attn_dcp_rank=0, tp_rank=0)
Req.is_dllm = lambda self: False
Req.init_diffusion_llm = lambda self, config: setattr(self, "dllm_config", config)
UnifiedRadixCache._all_reduce = lambda *_: None  # one rank


# --- Copies, at once ------------------------------------------------------------------------------
class Event:
    query = lambda self: True
    record = wait = synchronize = lambda self, *_: None
    elapsed_time = lambda self, _: 0.0


class Engine:
    """Copies states from pool to pool."""

    def __init__(self, *_):
        pass

    def copy(self, transfers, source, target):
        for t in transfers:
            if t.host_pool is hosts[MAMBA]:
                ends = {"host": (hosts[MAMBA].states, t.host_indices)}
                ends["device"] = state, t.device_indices
                ends[target][0][ends[target][1]] = ends[source][0][ends[source][1]]
        return bag(start_event=Event(), finish_event=Event(), timing_enabled=False)

    def submit_device_to_host(self, transfers):
        return self.copy(transfers, "device", "host")

    def submit_host_to_device(self, transfers, **_):
        return self.copy(transfers, "host", "device")


class Host(host_base.HostKVCache):
    layer_num = target_layer_num = 1

    def __init__(self, size):
        self.slots, self.states = size, torch.zeros(size)
        super().__init__(
            dtype=torch.float32,
            device_capacity_tokens=0,
            size_per_token=4,
            start_layer=0,
            end_layer=1,
            host_to_device_ratio=1,
            host_size=0,
            page_size=1,
            layout="layer_first",
            pin_memory=False,
            device="cpu",
            host_token_capacity=size,
        )

    init_kv_buffer = lambda self: torch.zeros(self.slots)
    get_size_per_token = lambda self: 4


Host.__abstractmethods__ = frozenset()
controllers.device_module = bag(Event=Event, current_stream=lambda: bag(wait_event=lambda _: None))
controllers.L2TransferEngine = Engine
controllers.HiCacheController.move_indices = lambda self, host, device: (host, device)

# --- SGLang's pools and tree: one layer, four state slots ----------------------------------------
shape = bag(conv=[(1, 1)], temporal=(1, 1, 1), num_k_heads_per_tp=1)
pool = HybridReqToTokenPool(
    size=4,
    mamba_size=4,
    mamba_spec_state_size=0,
    max_context_len=2048,
    device="cpu",
    enable_memory_saver=False,
    cache_params=bag(
        shape=shape, dtype=bag(conv=torch.float32, temporal=torch.float32), layers=[1], is_kda=False
    ),
    mamba_layer_ids=[1],
    enable_mamba_extra_buffer=False,
    enable_overlap_schedule=False,
)
state, slots = pool.mamba_pool.mamba_cache.temporal[0, :, 0, 0, 0], pool.mamba_allocator
memory = bag(
    device="cpu",
    page_size=1,
    dtype=torch.float32,
    layer_num=1,
    layer_transfer_counter=None,
    register_layer_transfer_counter=lambda _: None,
)
kv = TokenToKVPoolAllocator(2048, torch.float32, "cpu", memory, False)
parameters = CacheInitParams(
    disable=False,
    req_to_token_pool=pool,
    token_to_kv_pool_allocator=kv,
    page_size=1,
    enable_mamba_extra_buffer=False,
    tree_components=(FULL, MAMBA),
    tree_core_backend="python",
)
tree = UnifiedRadixCache(parameters)
with host_base.host_memory_budget_scope(1 << 30):
    hosts = {FULL: Host(2048), MAMBA: Host(16)}
entry = lambda **named: assembler.build_pool_entry(transfer_layer_id_max=2, **named)
group = HostPoolGroup(
    [
        entry(
            name=PoolName.KV,
            host_pool=hosts[FULL],
            device_pool=memory,
            layer_mapping={0: 0},
            is_anchor=True,
        ),
        entry(
            name=PoolName.MAMBA,
            host_pool=hosts[MAMBA],
            device_pool=pool.mamba_pool,
            layer_mapping={1: 0},
            host_evict_fn=lambda n: tree.evict_host(n, MAMBA),
            device_evict_fn=lambda n: assembler._evict_mamba_for_device_alloc(tree, n),
            device_alloc_fn=slots.alloc,
            device_free_fn=slots.free,
        ),
    ]
)
control = hybrid.HybridCacheController(
    kv,
    group,
    1,
    None,
    load_cache_event=None,
    write_policy="write_through",
    io_backend="direct",
    transfer_layer_id_max=2,
)
built = assembler.StackBuildResult(
    host_pool_group=group,
    cache_controller=control,
    component_host_pools=hosts,
    register_req_to_token_counter=False,
)
assembler._apply_stack_result(tree, memory, parameters, built)
tree.tree_core.set_hicache_enabled()
tree.write_through_threshold, tree.is_write_back, tree.load_back_threshold = 1, False, 10

sampling = bag(
    max_new_tokens=8,
    ignore_eos=False,
    custom_params=None,
    stop_strs=[],
    stop_regex_strs=[],
    stop_token_ids=None,
)


def store(tokens, size):
    """A request has finished with its first tokens, and they are backed up."""
    slot = slots.alloc(1)
    state[slot] = size
    tree.insert(
        InsertParams(key=RadixKey(tokens[:size], None), value=kv.alloc(size), mamba_value=slot)
    )
    tree.flush_pending_backups()
    tree.check_hicache_events()


def load(req):
    return tree.init_load_back(
        InitLoadBackParams(
            best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req
        )
    )


def prefilled_from(req):
    """The state from which the request's prefill goes on: what its slot holds, or what the batch
    copies there or clears."""
    allocation.alloc_req_slots(pool, [req], tree)
    fences = bag()
    ScheduleBatch._collect_deferred_mamba_cow_and_clear(fences, [req])
    if fences.mamba_clear_indices is not None:
        pool.mamba_pool.clear_slots(fences.mamba_clear_indices)
    if fences.mamba_cow_src_indices is not None:
        pool.copy_mamba_state(fences.mamba_cow_src_indices, fences.mamba_cow_dst_indices)
    return int(state[int(req.kv.mamba_pool_idx)])

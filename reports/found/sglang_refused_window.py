#!/usr/bin/env python3
"""SGLang 0.5.23, --enable-hierarchical-cache with a hybrid model that has sliding windows as well: a
request whose load of a window is refused goes on from a shorter prefix with the state of the longer
one; and, under write_back, the load ends the scheduler where making room for a state has cost the
host that window.

Needs SGLang's classes alone, and no GPU.

    python3 sglang_refused_window.py             # with SGLang installed
    python3 sglang_refused_window.py --repaired  # a refused load begins with the device's state
    python3 sglang_refused_window.py --assertion
"""

import array
import sys

import torch

import sglang_hicache as hicache
from sglang_hicache import (
    FULL,
    MAMBA,
    EvictParams,
    Host,
    InsertParams,
    RadixKey,
    Req,
    assembler,
    bag,
    entry,
    host_base,
    hybrid,
    load,
    pool,
    prefilled_from,
    sampling,
    slots,
    state,
)
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

SWA = ComponentType.SWA
WINDOW = 20  # tokens before a token that it sees
ASSERTION = "--assertion" in sys.argv
POLICY = "write_back" if ASSERTION else "write_through"


class Kv(BaseSWAKVPool):
    """Stands for both pools of KV; the mapping between their slots is SGLang's."""

    swa_req_ring_size = full_to_swa_index_mapping = layer_transfer_counter = None
    device, page_size, dtype, layer_num = "cpu", 1, torch.float32, 1

    def __init__(self):
        self.full_kv_pool = self.swa_kv_pool = bag(device="cpu", page_size=1, dtype=torch.float32)

    def register_mapping(self, mapping):
        self.full_to_swa_index_mapping = mapping

    def translate_loc_from_full_to_swa(self, indices):
        return self.full_to_swa_index_mapping[indices]

    register_layer_transfer_counter = lambda self, _: None


# --- The same tree once more, with windows: 40 tokens of them on the device, 20 on the host -------
Kv.__abstractmethods__ = frozenset()
memory = Kv()
kv = SWATokenToKVPoolAllocator(2048, 40, 1, torch.float32, "cpu", memory, False)
for each in (kv.full_attn_allocator, kv.swa_attn_allocator):
    each.use_triton_kernels = False
parameters = CacheInitParams(
    disable=False,
    req_to_token_pool=pool,
    token_to_kv_pool_allocator=kv,
    page_size=1,
    enable_mamba_extra_buffer=False,
    tree_components=(FULL, SWA, MAMBA),
    tree_core_backend="python",
    sliding_window_size=WINDOW,
)
tree = UnifiedRadixCache(parameters)
with host_base.host_memory_budget_scope(1 << 30):
    hosts = {FULL: Host(2048), MAMBA: Host(16), SWA: Host(10 if ASSERTION else 100)}
hicache.hosts, hicache.kv, hicache.tree = hosts, kv, tree
windows = kv.swa_attn_allocator
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
        entry(
            name=PoolName.SWA,
            host_pool=hosts[SWA],
            device_pool=bag(),
            layer_mapping={1: 0},
            host_evict_fn=lambda n: tree.evict_host(n, SWA),
            device_evict_fn=lambda n: assembler._evict_swa_for_device_alloc(tree, n),
            device_alloc_fn=windows.alloc,
            device_free_fn=windows.free,
        ),
    ]
)
control = hybrid.HybridCacheController(
    kv,
    group,
    1,
    None,
    load_cache_event=None,
    write_policy=POLICY,
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
tree.tree_core.has_swa_host_pool = True
tree.write_through_threshold, tree.is_write_back, tree.load_back_threshold = 1, ASSERTION, 10


def store(tokens):
    """A request has finished with these tokens; under write_through they are backed up."""
    slot, params = slots.alloc(1), InsertParams(key=RadixKey(tokens, None))
    state[slot] = len(tokens)
    params.value, params.mamba_value = kv.alloc(len(tokens)), slot
    params.set_evicted_seqlen(SWA, 0)
    tree.insert(params)
    tree.flush_pending_backups()
    tree.check_hicache_events()


# --- 20 tokens with a state, in two nodes; the first one's window leaves the device ---------------
path = array.array("q", range(20))
store(path)
other = Req("other", "", path[:10] + array.array("q", [99]), sampling)
other.init_next_round_input(tree)  # it has the first 10 tokens in common, and splits them off
if ASSERTION:
    store(array.array("q", range(40, 50)))
    slots.alloc(slots.available_size())  # running requests hold the other slots
tree.evict(EvictParams(num_tokens=0, swa_num_tokens=10))
busy = kv.alloc(windows.available_size() if not ASSERTION else 10)  # running requests' windows

# --- A request that continues them: match, load, forward, as the scheduler does -------------------
req = Req("r", "", path + array.array("q", [100] * 4), sampling)
req.init_next_round_input(tree)
print(f"the match: {req.prefix_len} tokens on the device, {req.swa_host_hit_length} of the window")
req.lock = tree.lock(req.last_node)
loaded, req.last_node = load(req)
print(f"the load brings {loaded} tokens, so the request begins with {req.prefix_len}")
if "--repaired" in sys.argv and loaded == 0:
    req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, True
print(f"its prefill goes on from a state of {prefilled_from(req)} tokens")

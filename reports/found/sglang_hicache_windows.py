"""SGLang 0.5.23's tree of sglang_hicache.py once more, with sliding windows of 20 tokens: 40 tokens
of them on the device, on the host as many as `host_windows`. For the scripts beside this one.
"""

import torch

import sglang_hicache as hicache
from sglang_hicache import FULL, MAMBA, Host, InsertParams, RadixKey
from sglang_hicache import assembler, bag, entry, host_base, hybrid, pool, slots, state
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

SWA = ComponentType.SWA
WINDOW = 20  # tokens before a token that it sees


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


Kv.__abstractmethods__ = frozenset()


def windowed(host_windows, host_states=16, policy="write_through"):
    """The tree, its allocator of KV, and the pools of the host."""
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
        hosts = {FULL: Host(2048), MAMBA: Host(host_states), SWA: Host(host_windows)}
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
        write_policy=policy,
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
    tree.write_through_threshold, tree.load_back_threshold = 1, 10
    tree.is_write_back = policy == "write_back"
    return tree, kv, hosts


def store(tree, kv, tokens, known=0):
    """A request has finished with these tokens, the first `known` of them with the tree's KV; under
    write_through a backup begins."""
    slot, params = slots.alloc(1), InsertParams(key=RadixKey(tokens, None), prev_prefix_len=known)
    state[slot] = len(tokens)
    params.value, params.mamba_value = kv.alloc(len(tokens)), slot
    params.set_evicted_seqlen(SWA, 0)
    tree.insert(params)
    tree.flush_pending_backups()

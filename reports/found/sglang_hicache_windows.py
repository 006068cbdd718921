"""SGLang 0.5.23's tree of sglang_hicache.py once more, with sliding windows of 20 tokens: 40 tokens
of them on the device, on the host as many as `host_windows`. For the scripts beside this one.
"""

import torch

import sglang_hicache as hicache
from sglang_hicache import FULL, MAMBA, Host, InsertParams, PoolName, RadixKey
from sglang_hicache import assembler, bag, host_base, pool, slots, state, tree_parameters, with_host
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType

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
    windows = kv.swa_attn_allocator
    for each in (kv.full_attn_allocator, windows):
        each.use_triton_kernels = False
    with host_base.host_memory_budget_scope(1 << 30):
        hosts = {FULL: Host(2048), MAMBA: Host(host_states), SWA: Host(host_windows)}
    pool_of_windows = lambda tree: [dict(
        name=PoolName.SWA, host_pool=hosts[SWA], device_pool=bag(), layer_mapping={1: 0},
        host_evict_fn=lambda n: tree.evict_host(n, SWA),
        device_evict_fn=lambda n: assembler._evict_swa_for_device_alloc(tree, n),
        device_alloc_fn=windows.alloc, device_free_fn=windows.free)]
    tree, _ = with_host(tree_parameters(pool, kv, (FULL, SWA, MAMBA), sliding_window_size=WINDOW), memory, hosts,
                        policy, pool_of_windows)
    tree.tree_core.has_swa_host_pool = True
    hicache.hosts, hicache.kv, hicache.tree = hosts, kv, tree
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

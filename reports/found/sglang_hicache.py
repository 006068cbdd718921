"""SGLang 0.5.23's hybrid tree with a host tier, on a CPU: its own pools, tree, HybridCacheController
and scheduler's classes, for the scripts beside this one. A state is the number of tokens that it
stands for; a cleared slot is 0. Copies are done at once: those to the host are nothing but their
lists of free slots, and a load writes the state that the host has.
"""

import torch

import sglang.srt.managers.cache_controller as controllers
import sglang.srt.mem_cache.allocation as allocation
import sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller as hybrid
import sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler as assembler
import sglang.srt.mem_cache.pool_host.base as host_base
import sglang.srt.runtime_context as runtime
import sglang_scheduler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InitLoadBackParams, InsertParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang_scheduler import bag, pool_of, states_of, tree_parameters

FULL, MAMBA = ComponentType.FULL, ComponentType.MAMBA

sglang_scheduler.configure(extra_buffer=False)
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
            dtype=torch.float32, device_capacity_tokens=0, size_per_token=4, start_layer=0, end_layer=1,
            host_to_device_ratio=1, host_size=0, page_size=1, layout="layer_first", pin_memory=False,
            device="cpu", host_token_capacity=size)

    init_kv_buffer = lambda self: torch.zeros(self.slots)
    get_size_per_token = lambda self: 4


Host.__abstractmethods__ = frozenset()
controllers.device_module = bag(Event=Event, current_stream=lambda: bag(wait_event=lambda _: None))
controllers.L2TransferEngine = Engine
controllers.HiCacheController.move_indices = lambda self, host, device: (host, device)


def with_host(parameters, memory, hosts, policy="write_through", more=lambda _: ()):
    """The tree of these parameters, and the controller of its copies. more(tree) has pools of the host beside those of KV
    and states."""
    tree = UnifiedRadixCache(parameters)
    entry = lambda **named: assembler.build_pool_entry(transfer_layer_id_max=2, **named)
    group = HostPoolGroup([
        entry(name=PoolName.KV, host_pool=hosts[FULL], device_pool=memory, layer_mapping={0: 0}, is_anchor=True),
        entry(name=PoolName.MAMBA, host_pool=hosts[MAMBA], device_pool=pool.mamba_pool, layer_mapping={1: 0},
              host_evict_fn=lambda n: tree.evict_host(n, MAMBA),
              device_evict_fn=lambda n: assembler._evict_mamba_for_device_alloc(tree, n),
              device_alloc_fn=slots.alloc, device_free_fn=slots.free),
        *(entry(**named) for named in more(tree))])
    control = hybrid.HybridCacheController(
        parameters.token_to_kv_pool_allocator, group, 1, None, load_cache_event=None, write_policy=policy,
        io_backend="direct", transfer_layer_id_max=2)
    built = assembler.StackBuildResult(host_pool_group=group, cache_controller=control, component_host_pools=hosts,
                                       register_req_to_token_counter=False)
    assembler._apply_stack_result(tree, memory, parameters, built)
    tree.tree_core.set_hicache_enabled()
    tree.write_through_threshold, tree.load_back_threshold = 1, 10
    tree.is_write_back = policy == "write_back"
    return tree, control


# --- SGLang's pools and tree: one layer, four state slots ----------------------------------------
pool = pool_of(4, 1)
state, slots = states_of(pool), pool.mamba_allocator
memory = bag(device="cpu", page_size=1, dtype=torch.float32, layer_num=1, layer_transfer_counter=None,
             register_layer_transfer_counter=lambda _: None)
kv = TokenToKVPoolAllocator(2048, torch.float32, "cpu", memory, False)
with host_base.host_memory_budget_scope(1 << 30):
    hosts = {FULL: Host(2048), MAMBA: Host(16)}
tree, control = with_host(tree_parameters(pool, kv), memory, hosts)
sampling = sglang_scheduler.sampling(8)


def store(tokens, size):
    """A request has finished with its first tokens, and they are backed up."""
    slot = slots.alloc(1)
    state[slot] = size
    tree.insert(InsertParams(key=RadixKey(tokens[:size], None), value=kv.alloc(size), mamba_value=slot))
    tree.flush_pending_backups()
    tree.check_hicache_events()


def load(req):
    return tree.init_load_back(InitLoadBackParams(
        best_match_node=req.best_match_node, host_hit_length=req.host_hit_length, req=req))


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

#!/usr/bin/env python3
"""SGLang 0.5.23, --enable-hierarchical-cache with a hybrid model that has sliding windows as well:
a window that is evicted on the host takes along the state of its prefix, even while that state is
being copied to the host. The slot is free while the copy writes it.

Needs SGLang's classes alone, and no GPU.

    python3 sglang_window_takes_state.py             # with SGLang installed
    python3 sglang_window_takes_state.py --repaired  # a prefix with a backup in flight is passed
"""

import array
import sys

import sglang_hicache as hicache
from sglang_hicache import MAMBA, EvictParams, Req, sampling
from sglang_hicache_windows import SWA, store, windowed

flying = []


class Engine(hicache.Engine):
    """Copies to the host land when land() is called."""

    def submit_device_to_host(self, transfers):
        flying.append((self, transfers))
        return self.copy([], "device", "host")


def land():
    while flying:
        engine, transfers = flying.pop(0)
        engine.copy(transfers, "device", "host")


hicache.controllers.L2TransferEngine = Engine
tree, kv, hosts = windowed(host_windows=10, host_states=2)
states = hosts[MAMBA]
if "--repaired" in sys.argv:
    host_windows = tree.tree_core.host_lru_lists[SWA]
    step = host_windows.get_prev_no_host_lock

    def without_a_backup(node, check_id=True):
        node = step(node, check_id)
        while node is not None and node.write_through_pending_id is not None:
            node = step(node)
        return node

    host_windows.get_prev_no_host_lock = without_a_backup

# --- 30 tokens that a request holds; the window of the first 10 is on the host alone --------------
path = array.array("q", range(30))
store(tree, kv, path)  # two nodes, because a leaf has one window; the host has room for the first
land()
tree.check_hicache_events()
holder = Req("holder", "", path + array.array("q", [99]), sampling)
holder.init_next_round_input(tree)
holder.lock = tree.lock(holder.last_node)
tree.evict(EvictParams(num_tokens=0, swa_num_tokens=10))

# --- The first 10 get a state, which is being copied when other 10 tokens need the host's windows --
store(tree, kv, path[:10], known=10)
target = next(int(t.host_indices) for t in flying[-1][1] if t.host_pool is states)
print(f"the state of 10 tokens is being copied to slot {target} of the host")
store(tree, kv, array.array("q", range(50, 60)))

# --- A prefetch from a storage takes a slot and reads into it; its thread waits for no copy -------
prefetched = int(states.alloc(1))
states.states[prefetched] = 777
land()
print(f"a prefetch reads the state of 777 tokens into slot {prefetched} of the host")
print(f"when all copies have landed, that slot has the state of {int(states.states[prefetched])}")

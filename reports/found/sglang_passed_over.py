#!/usr/bin/env python3
"""SGLang 0.5.23, --enable-hierarchical-cache with --hicache-storage-backend and a hybrid model: a
request that is passed over because its cached prefix has shrunk keeps the source of a state's copy.
When the prefix has left the device meanwhile, the forward copies whatever that slot holds now over
the state that was loaded.

Needs SGLang's classes alone, and no GPU.

    python3 sglang_passed_over.py              # with SGLang installed
    python3 sglang_passed_over.py --repaired   # passed over, it drops the copy as when rejected
"""

import array
import queue
import sys

import sglang.srt.utils.common as utilities
from sglang_hicache import EvictParams, Req, bag, control, kv, load, prefilled_from, runtime
from sglang_hicache import sampling, slots, state, store, tree

utilities.suppress_noisy_warnings = lambda: None

from sglang.srt.managers.scheduler import Scheduler

# --- A storage that takes what is written and is never read: the prompts are short ----------------
runtime._CONTEXT._config_bags["memory"].hicache_storage_prefetch_retry_max_attempts = 8
tree.enable_storage = control.enable_storage = True
control.backup_queue = queue.Queue()
server = bag(tree_cache=tree, enable_hicache_storage=True, enable_lmcache=False)
server._prefetch_kvcache = lambda *what: Scheduler._prefetch_kvcache(server, *what)
server._retry_storage_prefetch = lambda *what: Scheduler._retry_storage_prefetch(server, *what)
tree.buffer_pipeline = None

# --- 20 and 40 tokens are on the device and on the host -------------------------------------------
for name in ("prefetch_hit", "ack_prefetch", "ack_backup", "host_mem_release"):
    setattr(control, f"{name}_queue", queue.Queue())
path = array.array("q", [1] * 20 + [2] * 20)
for size in (20, 40):
    store(path, size)
while not control.backup_queue.empty():  # written
    control.ack_backup_queue.put(control.backup_queue.get())
tree.check_hicache_events()

# --- A request that continues the 40 tokens enters the queue; then 40 is evicted from both tiers ---
req = Req("r", "", path + array.array("q", [3] * 4), sampling)
server._prefetch_kvcache(req)
print(f"in the queue: {req.prefix_len} tokens on the device")
tree.evict(EvictParams(num_tokens=20))
tree.evict_host(20)

# --- Its turn: match, the scheduler's check, and on to the next request ---------------------------
req.init_next_round_input(tree)
passed = Scheduler._prefetch_after_device_hit_loss(server, req)
print(f"its turn: {req.prefix_len} tokens on the device; passed over: {passed}")
if "--repaired" in sys.argv:
    req.kv.mamba_cow_src_index, req.kv.mamba_needs_clear = None, False
    slots.free(req.kv.mamba_pool_idx.unsqueeze(-1))
    req.kv.mamba_pool_idx = None

# --- The 20 tokens leave the device, and other requests run ---------------------------------------
tree.evict(EvictParams(num_tokens=20))
others = slots.alloc(slots.available_size())
state[others] = 777  # their states
slots.free(others[:2])  # two of them end

# --- Its next turn: match, load, forward ----------------------------------------------------------
req.init_next_round_input(tree)
req.lock = tree.lock(req.last_node)
loaded, req.last_node = load(req)
tree.ready_to_load_host_cache()
print(f"its next turn: {loaded} tokens are loaded from the host")
print(f"its prefill goes on from a state of {prefilled_from(req)} tokens")

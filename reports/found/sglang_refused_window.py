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

from sglang_hicache import EvictParams, Req, load, prefilled_from, sampling, slots
from sglang_hicache_windows import store, windowed

ASSERTION = "--assertion" in sys.argv
tree, kv, hosts = (
    windowed(host_windows=10, policy="write_back") if ASSERTION else windowed(host_windows=100))
windows = kv.swa_attn_allocator

# --- 20 tokens with a state, in two nodes; the first one's window leaves the device ---------------
path = array.array("q", range(20))
store(tree, kv, path)
tree.check_hicache_events()
other = Req("other", "", path[:10] + array.array("q", [99]), sampling)
other.init_next_round_input(tree)  # it has the first 10 tokens in common, and splits them off
if ASSERTION:
    store(tree, kv, array.array("q", range(40, 50)))
    tree.check_hicache_events()
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

#!/usr/bin/env python3
"""SGLang 0.5.23, --enable-hierarchical-cache with a hybrid model: a request whose load from the host
is refused goes on from the shorter prefix that the device has, without that prefix's state.

Needs SGLang's classes alone, and no GPU.

    python3 sglang_refused_load.py              # with SGLang installed
    python3 sglang_refused_load.py --repaired   # a refused load arranges the copy of the state
"""

import array
import sys

from sglang_hicache import MAMBA, EvictParams, Req, load, prefilled_from, sampling, slots, store, tree

# --- 20 tokens stay on the device, 40 go to the host ----------------------------------------------
path = array.array("q", [1] * 20 + [2] * 20)
held = slots.alloc(1)  # a running request's
for size in (20, 40):
    store(path, size)
tree.evict(EvictParams(num_tokens=20))
busy = slots.alloc(slots.available_size() - 1)  # other running requests hold all slots but one

# --- A request that continues the 40 tokens: match, load, forward, as the scheduler does ----------
req = Req("r", "", path + array.array("q", [3] * 4), sampling)
req.init_next_round_input(tree)
print(f"the match: {req.prefix_len} tokens on the device, {req.host_hit_length} on the host")
req.lock = tree.lock(req.last_node)
loaded, req.last_node = load(req)
print(f"the load brings {loaded} tokens, so the request begins with {req.prefix_len}")
if "--repaired" in sys.argv and loaded == 0 and req.prefix_len:
    req.kv.mamba_pool_idx = slots.alloc(1)[0]
    req.kv.mamba_cow_src_index = tree.tree_core.get_component_device_value(req.last_node, MAMBA)
    req.kv.mamba_needs_clear = False
print(f"its prefill goes on from a state of {prefilled_from(req)} tokens")

import array
import sys

import sglang.srt.mem_cache.common as common
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang_scheduler import Server, request

repaired = "--repaired" in sys.argv
server = Server(extra_buffer="--no-buffer" not in sys.argv, overlap=True, kv_tokens=1024, strip_thinking=True)
kv, tree = server.kv, server.tree


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
req = request("thinker", range(1, 101))
req.output_ids = array.array("q", range(1001, 1061))  # what it had when it was retracted
req.reasoning_tokens = 60
batch = server.batch_of(req, 160)
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

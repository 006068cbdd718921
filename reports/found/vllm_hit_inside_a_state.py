#!/usr/bin/env python3
"""vLLM 0.33.0, OffloadingConnector, a hybrid model whose Mamba block is larger than its attention
block: a hit that the attention's chunks end inside a Mamba chunk loads the state of that chunk's end.

    python3 vllm_hit_inside_a_state.py [--repaired]        # with vLLM installed
"""

import sys

from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm_blocks import attention, mamba
from vllm_offload import Engine


def repair(connector):
    """What lies before the chunk of states in which the hit ends is looked up instead."""
    unit, look_up = connector._mamba_align_size, connector._lookup_complete_chunks

    def look_up_whole(status, most=None):
        local = status.num_locally_computed_tokens
        while (hit := look_up(status, most)) and (local + hit) % unit:
            most = (local + hit) // unit * unit - local + 1  # it leaves out a token
            if most <= 1:
                return 0
        return hit

    connector._lookup_complete_chunks = look_up_whole


manager = CPUOffloadingManager(6)  # 4 chunks of attention and 2 of states: one prompt of 64 tokens
engine = Engine(manager, [attention(16), mamba(32)], 16)
if "--repaired" in sys.argv:
    repair(engine.core.connector.connector_scheduler)
hashes = engine.request("a", range(70), output=9).block_hashes
for _ in range(6):
    engine.step()
engine.request("b", range(1000, 1020))  # its one chunk takes the place of a's last one of attention
engine.run(40)
engine.rest()
engine.core.reset_prefix_cache()  # a's blocks are somebody else's by now

state = {make_offload_key(hashes[2 * i + 1], 1): 32 * (i + 1) for i in range(2)}
place = {chunk.chunk_id: state[key] for key, chunk in manager._policy.chunks.items() if key in state}
again = engine.request("again", range(70))
output = engine.core.schedule()
for job in output.kv_connector_metadata.load_jobs.values():
    loaded = [place[int(id)] for id in job.src_spec.chunk_ids if int(id) in place]
    print(f"hit: {again.num_computed_tokens} tokens; the state that is loaded stands for {loaded}")
    sys.exit(loaded != [again.num_computed_tokens])
print("no hit")

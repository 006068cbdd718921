import sys

import sglang.srt.mem_cache.common as common
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang_scheduler import Server, process, request

server = Server(extra_buffer=False, overlap=False, enable_linear_replayssm=True, linear_replayssm_cache_len=16)
state = server.state
window = server.pool.mamba_pool.mamba_cache.conv[0][0, :, 0, 0]  # [slots]
cursor = server.pool.mamba_pool.replayssm_write_pos  # [slots]
processor = server.processor()
release = common.release_kv_cache


def release_repaired(req, tree_cache, *, checkpoint):
    """Nothing is stored of a request whose ring is pending."""
    pending = int(cursor[int(req.kv.mamba_pool_idx)])
    release(req, tree_cache, checkpoint=checkpoint and pending == 0)


if "--repaired" in sys.argv:
    for module in (common, schedule_batch, batch_result_processor):
        module.release_kv_cache = release_repaired


def forward(batch):
    """The kernels: every token shifts the convolution's window; a decode step writes the state where
    the ring is full or the length is on the track interval."""
    for row, req in enumerate(batch.reqs):
        size, slot = int(batch.seq_lens_cpu[row]), int(req.kv.mamba_pool_idx)
        window[slot] = size
        if not batch.forward_mode.is_decode():
            state[slot] = size
        elif int(cursor[slot]) == 15 or size % 256 == 0:
            state[slot], cursor[slot] = size, 0
        else:
            cursor[slot] += 1


# --- A prompt of 255 tokens: the first decode step makes 256, the first boundary -----------------
req = request("r", range(1, 256))
batch = server.batch_of(req, 255)
forward(batch)
process(processor, batch, "prefill")
while not req.finished():
    batch.prepare_for_decode()
    forward(batch)
    if len(req.output_ids) == 40:  # the token that this result brings is a stop token
        req.to_finish = FINISH_MATCHED_TOKEN(matched=0)
    process(processor, batch, "decode")

known = list(req.origin_input_ids) + list(req.output_ids)
print(f"the request stopped with {len(known) - 1} tokens")
wrong = False
for slot, end in server.stored_states():
    seen = int(state[slot]), int(window[slot])
    wrong |= seen != (end, end)
    print(f"the tree has a state of {seen[0]} and a window of {seen[1]} on a key of {end}")

# --- The next turn of the conversation -----------------------------------------------------------
turn = request("next", known + [7] * 20)
turn.init_next_round_input(server.tree)
source = turn.kv.mamba_cow_src_index
if source is not None:
    seen = int(state[int(source)]), int(window[int(source)])
    print(f"the next turn hits {turn.prefix_len}, a state of {seen[0]} and a window of {seen[1]}")
sys.exit(1 if wrong else 0)

import sys

from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang_scheduler import Server, process, request

repaired = "--repaired" in sys.argv
server = Server(extra_buffer=True, overlap=True)
state = server.state


class Repaired(batch_result_processor.SchedulerBatchResultProcessor):
    def _mamba_prefix_cache_update(self, *_, **__):
        """The swap was made at the launch."""


processor = server.processor(Repaired) if repaired else server.processor()


def forward(batch):
    """The kernel: the running state, and where the batch says so a copy of it aside."""
    for row, req in enumerate(batch.reqs):
        size = int(batch.seq_lens_cpu[row])
        state[int(req.kv.mamba_pool_idx)] = size
        if bool(batch.mamba_track_mask[row]):
            at = size if batch.forward_mode.is_decode() else req.kv.mamba_last_track_seqlen
            state[int(batch.mamba_track_indices[row])] = at
            if repaired and batch.forward_mode.is_decode():
                req.kv.mamba_next_track_idx = 1 - batch.mamba_track_buffer_indices[row]


# --- A prompt of 255 tokens: the first decode step makes 256, the first boundary -----------------
req = request("r", range(1, 256))
batch = server.batch_of(req, 255)
forward(batch)
launched = [(batch.copy(), "prefill")]
# event_loop_overlap: a step is launched, then the result of the step before it is processed.
while not req.finished():
    batch.prepare_for_decode()
    forward(batch)
    launched.append((batch.copy(), "decode"))
    if len(req.output_ids) == 256:  # the token that this result brings is a stop token
        req.to_finish = FINISH_MATCHED_TOKEN(matched=0)
    process(processor, *launched.pop(0))

print(f"the request stopped with {len(req.origin_input_ids) + len(req.output_ids) - 1} tokens")
wrong = False
for slot, end in server.stored_states():
    wrong |= int(state[slot]) != end
    print(f"the tree has a state of {int(state[slot])} tokens on a key of {end}")
sys.exit(1 if wrong else 0)

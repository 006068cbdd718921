#!/usr/bin/env python3
"""vLLM 0.33.0, whole images in a row and multi-token prediction: a request that waits holds an image in the
encoder's cache, and when its KV is evicted, an earlier image of its own finds no room for ever.

    python3 vllm_waiting_image.py [--repaired]        # with vLLM installed
"""

import sys

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import RequestStatus
from vllm_blocks import Request, SamplingParams, attention, hasher, scheduler, step

core = scheduler(4, [attention(16)], budget=4, drafts=1, modules=1)  # three blocks, and the null block
core.scheduler_config.disable_chunked_mm_input = True
core.max_num_encoder_input_tokens = 3
core.encoder_cache_manager = EncoderCacheManager(cache_size=3)


class PutAside(set):
    """The requests that a schedule puts aside, which hold no image meanwhile."""

    def add(self, request):
        core.encoder_cache_manager.free(request)
        super().add(request)


if "--repaired" in sys.argv:
    core.deferred_waiting = PutAside()


def request(name, first, size, outputs, images=()):
    return Request(
        name,
        list(range(first, first + size)),
        SamplingParams(max_tokens=outputs),
        None,
        block_hasher=hasher(16, 1),
        mm_features=[
            MultiModalFeatureSpec(None, "image", f"{at}", PlaceholderRange(at, length))
            for at, length in images
        ])


chat = request("chat", 100, 4, 50)
core.add_request(chat)
step(core)
images = request("images", 200, 21, 4, [(4, 2), (15, 2), (17, 3)])
core.add_request(images)
while images.num_preemptions == 0:
    print(step(core), "images", images.num_computed_tokens)
print("images is preempted; the cache of the encoder:", core.encoder_cache_manager.cached)
core.add_request(request("short", 300, 3, 1))
print(step(core), "; the cache of the encoder:", core.encoder_cache_manager.cached)
core.finish_requests("chat", RequestStatus.FINISHED_ABORTED)
print("chat's client leaves")
idle = 0
while core.get_num_unfinished_requests() and idle < 1000:
    rows = step(core)
    idle = 0 if rows else idle + 1
    if idle < 3:
        print(rows, "images", images.num_computed_tokens, "; the cache:", core.encoder_cache_manager.cached)
print(f"{idle} calls of schedule() in a row scheduled nothing")
sys.exit(1 if idle else 0)

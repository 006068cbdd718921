#!/usr/bin/env python3
"""vLLM 0.33.0, OffloadingConnector: a second reset of the prefix cache with the connector's, before the
next step, ends the engine if copies were in flight at the first one.

    python3 vllm_second_reset.py        # with vLLM installed
"""

import sys
import traceback

from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm_blocks import attention
from vllm_offload import Engine

engine = Engine(CPUOffloadingManager(16), [attention(16)], 16)
engine.request("a", range(100))
for _ in range(5):  # the store of its last chunks is in flight
    engine.step(lands=False)
print("the request has ended:", not engine.core.get_num_unfinished_requests())
print("copies in flight:", len(engine.waiting | engine.flying))
print("first reset:", engine.core.reset_prefix_cache(reset_connector=True))
try:
    print("second reset:", engine.core.reset_prefix_cache(reset_connector=True))
except AssertionError as error:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    print(f"second reset: AssertionError in {frame.name}, line {frame.lineno}: {frame.line}")
    sys.exit(1)

#!/usr/bin/env python3
"""vLLM 0.33.0, OffloadingConnector with a second tier (TieringOffloadingManager): a chunk that is
promoted to the CPU tier takes the place of one that the same request waits for, or that the same
look-up has just counted as a hit.

    python3 vllm_promotion_evicts_own.py        # with vLLM installed
"""

import sys
import traceback

from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm_blocks import attention, mamba
from vllm_offload import Engine, tiers

STEPS = 1000


def forget(engine):
    engine.rest()
    engine.core.reset_prefix_cache()


def alone():
    """One request of 8 chunks, which the second tier has; a CPU tier of 7."""
    manager, _, second = tiers(7)
    engine = Engine(manager, [attention(16)], 16)
    prompt = range(8 * 16)
    engine.request("a", prompt)
    engine.run(40)
    forget(engine)
    engine.request("b", [*prompt, 1, 2, 3])
    idle = engine.run(STEPS)
    waits = "b" in engine.core.requests
    print(f"alone: {second.get_num_chunks()} chunks on the second tier, a CPU tier of 7")
    print(f"  {STEPS} steps: nothing is computed in {idle} of them; b still waits: {waits}")
    return waits


def two():
    """Two requests of 4 chunks each; a CPU tier of 7. The first one ends, the second never begins."""
    manager, _, _ = tiers(7)
    engine = Engine(manager, [attention(16)], 16)
    prompts = {"x": range(1000, 1064), "y": range(5000, 5064)}
    for name, prompt in prompts.items():
        engine.request(name, prompt)
        engine.run(40)
    forget(engine)
    for name, prompt in prompts.items():
        engine.request(name + "2", [*prompt, 1, 2, 3])
    idle = engine.run(STEPS)
    waiting = [name for name, request in engine.core.requests.items() if not request.is_finished()]
    print("two: 4 chunks each, a CPU tier of 7")
    print(f"  {STEPS} steps: nothing is computed in {idle} of them; still waiting: {waiting}")
    return bool(waiting)


def tail():
    """Hybrid, hits inside blocks. A full CPU tier has the whole chunks of a prompt, as its oldest; the
    second tier alone has the boundary inside the next block. (A boundary's chunks are evicted before
    the chunks before it, so this is the usual order.)"""
    manager, cpu, second = tiers(8)
    engine = Engine(manager, [attention(32), mamba(32)], 16)
    prompt = list(range(88))
    hashes = engine.request("probe", prompt).block_hashes
    engine.run(40)
    forget(engine)
    manager.reset_cache()
    manager.on_reset_flushed()
    second.chunks.clear()
    whole = [make_offload_key(hashes[i], group) for i, group in ((1, 0), (3, 0), (1, 1), (3, 1))]
    others = [make_offload_key(bytes([i]) * 32, 0) for i in range(4)]
    for name, keys in (("old", whole), ("new", others)):
        context = ReqContext(req_id=name)
        manager.on_new_request(context)
        manager.prepare_store(keys, context)
        manager.complete_store(keys, context)
        manager.on_request_finished(context)
    second.chunks.update({make_offload_key(hashes[4], group): True for group in (0, 1)})
    engine.request("r", prompt)
    print("tail: a prompt of 88 tokens, 64 of them in whole chunks on the CPU tier")
    try:
        engine.step()
    except AssertionError as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        print(f"  schedule() ends: {frame.name}, line {frame.lineno}: …{str(error)[-19:]}")
        return True
    print("  schedule() goes on")
    return False


sys.exit(1 if sum([alone(), two(), tail()]) else 0)

"""vLLM 0.33.0's Scheduler with its OffloadingConnector in small: what the scripts about its tiers share.
The connector's scheduler side, the CPU tier's manager and TieringOffloadingManager are vLLM's own, the
second tier is its example, in memory. The worker is left out: every copy is done at the end of the step
that it starts in, or never (lands=False). Needs vLLM's classes alone, no GPU and no model."""

import vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler as offloading
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (get_sliding_window_size_in_chunks)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import (CPUPrimaryTierOffloadingManager, TieringOffloadingManager)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from vllm_blocks import (Request, SamplingParams, attention, bag, cache_config, hasher, scheduler)

offloading._group_kv_bytes_per_block = lambda group: group.kv_cache_spec.block_size


def tiers(chunks):
    """A CPU tier of so many chunks, with the example tier behind it: manager, CPU tier, example."""
    memory = memoryview(bytearray(chunks)).cast("B", (chunks, 1))
    region = bag(create_kv_memoryview=lambda: memory, cleanup=lambda: None)
    cpu = CPUPrimaryTierOffloadingManager(chunks, region)
    spec = bag("kv_events_config", config=bag(enable_kv_cache_events=False, extra_config={}))
    second = ExampleSecondaryTierManager(spec, cpu.get_kv_memoryview(), "example")
    return TieringOffloadingManager(cpu, [second]), cpu, second


class Engine:
    """A Scheduler whose connector stores chunks of one block with this manager."""

    def __init__(self, manager, specs, hash_block, budget=32, blocks=40, drafts=0):
        groups = [
            bag(
                group_id=i,
                tokens_per_block=spec.block_size,
                layer_names=(f"layer{i}",),
                sliding_window_size_in_chunks=get_sliding_window_size_in_chunks(spec, spec.block_size))
            for i, spec in enumerate(specs)
        ]
        spec = bag(
            config=bag(groups=groups), blocks_per_chunk=1, tokens_per_hash=hash_block, offload_prompt_only=False,
            tokens_per_block=[one.block_size for one in specs], extra_config={}, get_manager=lambda: manager,
            kv_events_config=OffloadingKVEventsConfig(False, False))

        def connector(config, **_):
            made = OffloadingConnector.__new__(OffloadingConnector)
            made._kv_transfer_config, made._vllm_config = config.kv_transfer_config, config
            made._kv_cache_config = cache_config(blocks, specs)
            made._kv_cache_manager = made.connector_worker = None
            made.connector_scheduler = offloading.OffloadingConnectorScheduler(spec, config, made._kv_cache_config)
            return made

        KVConnectorFactory.create_connector = connector
        transfer = bag(kv_load_failure_policy="recompute", is_kv_consumer=True, is_kv_producer=True)
        self.core = scheduler(blocks, specs, budget, transfer=transfer, hash_block=hash_block, drafts=drafts)
        self.hasher = hasher(hash_block)
        self.waiting, self.flying = {}, {}  # jobs: stores of this step, and copies in flight

    def request(self, name, tokens, output=1):
        parameters = SamplingParams(max_tokens=output)
        made = Request(name, list(tokens), parameters, None, arrival_time=0.0, block_hasher=self.hasher)
        self.core.add_request(made)
        return made

    def step(self, lands=True):
        """schedule(), the copies that the worker starts, and the result; who computed how much."""
        output = self.core.schedule()
        meta = output.kv_connector_metadata
        self.flying |= self.waiting | meta.load_jobs
        self.waiting = meta.store_jobs
        done, received = OffloadingWorkerMetadata(), set()
        for id, job in list(self.flying.items()) if lands else ():
            done.mark_completed(id)
            if id in self.flying and hasattr(job.src_spec, "chunk_ids"):
                received.add(job.req_id)
            del self.flying[id]
        names = list(output.num_scheduled_tokens)
        sampled = [[] if self.core.requests[one].is_prefill_chunk else [7] for one in names]
        told = KVConnectorOutput(
            finished_recving=received, kv_connector_worker_meta=done if done.completed_jobs else None)
        places = {name: i for i, name in enumerate(names)}
        self.core.update_from_output(output, ModelRunnerOutput(names, places, sampled, kv_connector_output=told))
        return dict(output.num_scheduled_tokens)

    def run(self, most):
        """Steps until all requests have ended; how many in which nothing was computed."""
        idle = 0
        for _ in range(most):
            if not self.core.get_num_unfinished_requests():
                break
            idle += not self.step()
        return idle

    def rest(self):
        """Steps in which copies end."""
        for _ in range(4):
            self.step()

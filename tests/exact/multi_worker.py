"""The worker side of vLLM's MultiConnector: hand-offs, and a host whose copies take ticks and move nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import TransferResult

from exact.pd_worker import Worker, transfer_config

if TYPE_CHECKING:
    from exact.pd_network import Line, Network


class Link:
    """Copies of one direction, in order: each waits until the link is free, occupies it, and has a latency."""

    def __init__(self, latency: int, blocks_per_tick: int | None) -> None:
        self._latency = latency
        self._blocks_per_tick = blocks_per_tick
        self._free = 0
        self._copies: list[tuple[int, int]] = []  # job and the tick in which it is done

    def submit(self, job: int, blocks: int, tick: int) -> int:
        """Queue a copy and return the tick in which it is done."""
        rate = self._blocks_per_tick
        self._free = max(tick, self._free) + (0 if rate is None else -(-blocks // rate))
        done = self._free + self._latency
        self._copies.append((job, done))
        return done

    def flush(self, jobs: set[int], tick: int) -> None:
        """End the last of these jobs now, and all before it."""
        last = max((place for place, (job, _) in enumerate(self._copies) if job in jobs), default=-1)
        self._copies = [
            (job, min(done, tick) if place <= last else done)
            for place, (job, done) in enumerate(self._copies)
        ]

    def take_done(self, tick: int) -> list[int]:
        """Remove the copies at the front that are done."""
        count = next(
            (place for place, (_, done) in enumerate(self._copies) if done > tick), len(self._copies)
        )
        taken, self._copies = self._copies[:count], self._copies[count:]
        return [job for job, _ in taken]


class Copies:
    """The part of vLLM's OffloadingWorker that the connector calls."""

    def __init__(self, host: Line, network: Network) -> None:
        self._network = network
        self._stores = Link(host["store_ticks"], host["blocks_per_tick"])
        self._loads = Link(host["load_ticks"], host["blocks_per_tick"])
        self.posted: list[list[int]] = []
        """Jobs submitted in this iteration, each with the tick in which it is done."""

    def submit_store(self, job: int, source: Any, _target: Any) -> bool:
        """Start a copy to the host."""
        return self._submit(self._stores, job, source)

    def submit_load(self, job: int, _source: Any, target: Any, **_: Any) -> bool:
        """Start a copy to the device."""
        return self._submit(self._loads, job, target)

    def wait(self, jobs: set[int]) -> None:
        """End these jobs now."""
        for link in (self._stores, self._loads):
            link.flush(set(jobs), self._network.tick)

    def get_finished(self) -> list[Any]:
        """Return the results of the jobs that are done."""
        tick = self._network.tick
        done = [*self._stores.take_done(tick), *self._loads.take_done(tick)]
        return [TransferResult(job_id=job, success=True) for job in done]

    def _submit(self, link: Link, job: int, device: Any) -> bool:
        self.posted.append([job, link.submit(job, len(device.block_ids), self._network.tick)])
        return True


class HostedWorker(Worker):
    """A real MultiConnector around the real worker sides of both connectors."""

    def __init__(self, name: str, scheduler: Any, network: Network, side: Line, *, host_first: bool) -> None:
        transfer = transfer_config(name, {**side, "kv_role": side["nixl_role"]}, push=False)
        super().__init__(name, scheduler, network, push=False, transfer=transfer)
        self.copies = Copies(side["host"], network)
        hand_offs = _without_init(
            NixlPullConnector,
            connector_worker=self.real,
            connector_scheduler=None,
            _connector_metadata=None,
            kv_transfer_config=transfer,
        )
        offload_worker = _without_init(
            OffloadingConnectorWorker,
            worker=self.copies,
            _is_store_writer=True,
            _load_jobs={},
            _unsubmitted_store_jobs=[],
            _connector_worker_meta=OffloadingWorkerMetadata(),
        )
        offload = _without_init(
            OffloadingConnector,
            connector_worker=offload_worker,
            connector_scheduler=None,
            _connector_metadata=None,
        )
        children = [offload, hand_offs] if host_first else [hand_offs, offload]
        self._both: Any = _without_init(
            MultiConnector, _connectors=children, _extra_async_saves={}, _connector_metadata=None
        )

    def run_both(self, metadata: Any, finished: Any) -> tuple[Any, Any, Any]:
        """Run an iteration as vLLM's model runner does; return results, lost blocks, and the host's report."""
        self.agent.clear()
        self.expired.clear()
        self.copies.posted.clear()
        self._handshakes.end_due()
        both = self._both
        both.handle_preemptions(metadata)
        both.bind_connector_metadata(metadata)
        both.start_load_kv(None)
        both.wait_for_save()
        results = both.get_transfer_results(finished)
        invalid = both.get_block_ids_with_load_errors()
        report = both.build_connector_worker_meta()
        both.clear_connector_metadata()
        return results, invalid, report


def _without_init(kind: type, **fields: Any) -> Any:
    """Make an object whose constructor would open devices."""
    made: Any = object.__new__(kind)
    made.__dict__.update(fields)
    return made

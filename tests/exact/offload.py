"""Record scenarios with vLLM's native host offload: its scheduler side, and a worker whose transfers take steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import get_offload_block_hash
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from exact.play import Play
from exact.real import complete
from exact.steps import Line, StepLines, header_of, steps_of

if TYPE_CHECKING:
    from pathlib import Path

    from exact.play import Batch

ALIGNMENT = 4096
TOKEN_BYTES = 8
"""Keys and values of one token of the model in `real.py`."""


def record_offload(scenario: Line, model: Path) -> Line:
    """Record a scenario with a host tier; `recorded` has the header, a line per step, and the totals."""
    if "groups" in scenario["config"]:
        from exact.group_offload import record_group_offload  # releases before 0.33 lack what it imports

        return record_group_offload(scenario, model)
    play = Play(scenario, model, _transfer(scenario))
    host = Host(play)
    steps = StepLines(play)
    for number, batch, aborted, answers in steps_of(play, host):
        line = steps.add(number, batch, aborted, answers)
        line.update({"aborted": aborted, **host.line()})
    number_hashes(steps.lines, play.names.numbers)
    end = {**steps.end(busy=host.busy), **sum_transfers(steps.lines)}
    end |= {"aborted": host.aborted, "aborted_loading": host.aborted_loading}
    header = {**header_of(play), "offload": scenario["offload"]}
    return {"recorded": [{"header": header}, *steps.lines, {"end": end}]}


def _transfer(scenario: Line) -> Any:
    offload, config = scenario["offload"], complete(scenario)
    per_chunk = offload.get("blocks_per_chunk", 1)
    chunk_bytes = per_chunk * config["block_size"] * TOKEN_BYTES
    aligned = -(-chunk_bytes // ALIGNMENT) * ALIGNMENT
    return KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "cpu_bytes_to_use": offload["host_chunks"] * aligned,
            "blocks_per_chunk": per_chunk,
            "eviction_policy": offload.get("eviction_policy", "lru"),
            "offload_prompt_only": offload.get("offload_prompt_only", True),
        },
    )


class Host:
    """Observe the connector's scheduler side and simulate its worker.

    Stores of a step are submitted in the next one and take `store_steps`; loads take `load_steps`. Transfers of one
    direction finish in order; a flush finishes a store and all before it.
    """

    def __init__(self, play: Play) -> None:
        self._play = play
        self._side = play.scheduler.connector.connector_scheduler
        requests = play.scenario["requests"]
        self._arrival = {
            spec["id"]: (spec.get("arrival_time", i), spec.get("arrival_step", 0), i)
            for i, spec in enumerate(requests)
        }
        self._settings = play.scenario["offload"]
        self._line: Line = {}
        self._store_keys: list[Any] = []
        self._load_keys: list[Any] = []
        self._stores: list[tuple[int, int]] = []  # job and the step in which it is done
        self._loads: list[tuple[int, int, str]] = []
        self._deferred: list[int] = []
        self._meta: Any = None
        self._loading: list[str] = []
        self.aborted = 0
        self.aborted_loading = 0
        self._observe()
        self._start_line()

    @property
    def busy(self) -> bool:
        """Whether jobs are pending, or finished requests may still store."""
        return bool(self._side._jobs or self._play.scheduler.finished_req_ids)

    def on_aborted(self, names: list[str], when: str) -> None:
        """Count aborted requests, and those among them that were loading."""
        loading = self._loading if when == "before" else self._find_loading()
        self.aborted += len(names)
        self.aborted_loading += sum(name in loading for name in names)

    def run(self, step: int, batch: Batch) -> Any:
        """Advance the worker by a step and return its report."""
        meta, line = self._meta, self._line
        line["loads"] = [
            {**self._job(number, job, keys, load=True), "table": self._table(job.req_id)}
            for (number, job), keys in zip(meta.load_jobs.items(), self._load_keys, strict=True)
        ]
        line["stores"] = [
            self._job(number, job, keys, load=False)
            for (number, job), keys in zip(meta.store_jobs.items(), self._store_keys, strict=True)
        ]
        line["flush"] = sorted(meta.jobs_to_flush or ())
        line["blocks"] = new_blocks(batch)
        for number, keys in zip(
            [*meta.load_jobs, *meta.store_jobs], [*self._load_keys, *self._store_keys], strict=True
        ):
            self._side._jobs[number].keys = keys  # vLLM's set has no order
        self._stores += [(job, step + self._settings.get("store_steps", 0)) for job in self._deferred]
        self._deferred = [job for job in meta.store_jobs if job not in line["flush"]]
        self._stores += [(job, step) for job in meta.store_jobs if job in line["flush"]]
        last = max((i for i, (job, _) in enumerate(self._stores) if job in line["flush"]), default=-1)
        done = [job for i, (job, due) in enumerate(self._stores) if i <= last or due <= step]
        self._stores = [(job, due) for job, due in self._stores if job not in done]
        due_step = step + self._settings.get("load_steps", 0)
        self._loads += [(number, due_step, job.req_id) for number, job in meta.load_jobs.items()]
        loaded = [(job, name) for job, due, name in self._loads if due <= step]
        self._loads = [load for load in self._loads if load[1] > step]
        jobs = [*done, *(job for job, _ in loaded)]
        return KVConnectorOutput(
            finished_recving={name for _, name in loaded} or None,
            kv_connector_worker_meta=OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(jobs, 1)),
        )

    def line(self) -> Line:
        """Return the host's part of a step's line; chunks have their hashes still."""
        policy = self._side.manager._policy
        chunks = [*_chunks(policy)]
        line = self._line
        line["loading"] = self._loading = self._find_loading()
        line["host_events"] = [
            {"type": "stored" if isinstance(event, BlockStored) else "removed", "h": list(event.block_hashes)}
            for event in self._play.host_events
        ]
        self._play.host_events.clear()
        line["host_chunks"] = len(chunks)
        line["host_ready"] = sum(chunk.is_ready for chunk in chunks)
        line["host_lru"] = None
        if hasattr(policy, "_ranks"):
            oldest = sorted(policy._evictable, key=policy._ranks.__getitem__)[:8]
            line["host_lru"] = [_hash(key) for key in oldest]
        self._start_line()
        return {key: line[key] for key in KEYS}

    def _start_line(self) -> None:
        self._line = {key: [] for key in KEYS} | {"external": {}}
        self._store_keys, self._load_keys = [], []

    def _find_loading(self) -> list[str]:
        waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
        return [name for name in self._play.waiting if self._play.requests[name].status == waiting]

    def _table(self, name: str) -> list[int]:
        return list(self._play.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def _job(self, number: int, job: Any, keys: list[Any], *, load: bool) -> Line:
        (group,) = self._side._req_status[job.req_id].group_states
        line = self._describe(number, job, keys, load=load)
        line["chunks"] = [group.offload_keys.index(key) for key in keys]
        return line

    @staticmethod
    def _describe(number: int, job: Any, keys: list[Any], *, load: bool) -> Line:
        device, host = (job.dst_spec, job.src_spec) if load else (job.src_spec, job.dst_spec)
        return {
            "job": number,
            "req": job.req_id,
            "chunks": [],
            "h": [_hash(key) for key in keys],
            "gpu": [int(block) for block in device.block_ids],
            "host": [int(chunk) for chunk in host.block_ids],
        }

    def _observe(self) -> None:
        """Wrap the methods whose calls a recording shows."""
        side, manager = self._side, self._side.manager
        look, allocate, build = (
            side.get_num_new_matched_tokens,
            side.update_state_after_alloc,
            side.build_connector_meta,
        )
        store, load, report = manager.prepare_store, manager.prepare_load, side.update_connector_output

        def looked(request: Any, computed: int, *args: Any, **kwargs: Any) -> Any:
            answer = look(request, computed, *args, **kwargs)
            self._line["lookups"].append([request.request_id, computed, answer[0]])
            return answer

        def allocated(request: Any, blocks: Any, external: int) -> Any:
            if external:
                self._line["external"][request.request_id] = external
            return allocate(request, blocks, external)

        def built(output: Any) -> Any:
            # vLLM's set has no order; recordings have the order of arrival.
            names = output.finished_req_ids
            output.finished_req_ids = dict.fromkeys(sorted(names, key=self._arrival.__getitem__))
            self._meta = build(output)
            output.finished_req_ids = names
            return self._meta

        def stored(keys: Any, context: Any) -> Any:
            answer = store(keys, context)
            if answer is None:
                self._line["store_failed"].append(context.req_id)
            elif answer.keys_to_store:
                self._store_keys.append(list(answer.keys_to_store))
                self._line["evicted"] += [_hash(key) for key in answer.evicted_keys]
            return answer

        def loaded(keys: Any, context: Any) -> Any:
            self._load_keys.append(list(keys))
            return load(keys, context)

        def reported(output: Any) -> Any:
            meta = output.kv_connector_worker_meta
            self._line["jobs_done"] += list(meta.completed_jobs) if meta is not None else []
            return report(output)

        side.get_num_new_matched_tokens, side.update_state_after_alloc = looked, allocated
        side.build_connector_meta, side.update_connector_output = built, reported
        manager.prepare_store, manager.prepare_load = stored, loaded


KEYS = (
    *("lookups", "external", "loading", "loads", "stores", "store_failed", "flush", "blocks", "jobs_done"),
    *("evicted", "host_events", "host_chunks", "host_ready", "host_lru"),
)


def _hash(key: Any) -> Any:
    return maybe_convert_block_hash(get_offload_block_hash(key))


def _chunks(policy: Any) -> list[Any]:
    if hasattr(policy, "chunks"):
        return [*policy.chunks.values()]
    return [*policy.t1.values(), *policy.t2.values()]


def new_blocks(batch: Batch) -> dict[str, list[int]]:
    """Return the blocks that each scheduled request got; of an admitted one, its whole table.

    New requests come first and resumed ones last, wherever the output of a release has them.
    """
    cached = batch.output.scheduled_cached_reqs
    given = [(request.req_id, request.block_ids) for request in batch.output.scheduled_new_reqs]
    given += zip(cached.req_ids, cached.new_block_ids, strict=True)
    given.sort(key=lambda pair: pair[0] in batch.resumed)
    return {name: list(groups[0]) for name, groups in given if groups is not None and groups[0]}


def number_hashes(lines: list[Line], numbers: dict[Any, int]) -> None:
    """Replace hashes by the numbers in the GPU's events, or by negative ones if they are in no event."""
    known = dict(numbers)
    unknown = 0

    def number(hashes: list[Any]) -> list[int]:
        nonlocal unknown
        for value in hashes:
            if value not in known:
                unknown -= 1
                known[value] = unknown
        return [known[value] for value in hashes]

    for line in lines:
        for job in line["loads"] + line["stores"]:
            job["h"] = number(job["h"])
        line["evicted"] = number(line["evicted"])
        for event in line["host_events"]:
            event["h"] = number(event["h"])
        if line["host_lru"] is not None:
            line["host_lru"] = number(line["host_lru"])


def sum_transfers(lines: list[Line]) -> dict[str, int]:
    """Return the totals of lookups and transfers."""
    return {
        "load_jobs": sum(len(line["loads"]) for line in lines),
        "load_chunks": sum(len(job["chunks"]) for line in lines for job in line["loads"]),
        "store_jobs": sum(len(line["stores"]) for line in lines),
        "store_chunks": sum(len(job["chunks"]) for line in lines for job in line["stores"]),
        "store_failed": sum(len(line["store_failed"]) for line in lines),
        "host_evictions": sum(len(line["evicted"]) for line in lines),
        "flushed": sum(len(line["flush"]) for line in lines),
        "lookup_deferred": sum(hit is None for line in lines for _, _, hit in line["lookups"]),
        "external_tokens": sum(sum(line["external"].values()) for line in lines),
    }

"""A slow, obvious model of vLLM's native host offload: the scheduler model with its connector (vllm_connector.py).

`run_offload` turns a scenario of `golden/vllm-offload` into the lines of its recording. Chunks are named by the
tokens up to their end; the recording's numbers are given at the end, as the recorder gave them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .vllm_connector import Connector, Tracked
from .vllm_runs import abort_due
from .vllm_scheduler import VllmModel

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from .vllm_blocks import Block
    from .vllm_connector import Job, Release
    from .vllm_requests import Plan, Request


class Worker:
    """The fake worker of the recordings: a job takes so many steps, in order in each direction."""

    def __init__(self, store_steps: int, load_steps: int) -> None:
        self.store_steps, self.load_steps = store_steps, load_steps
        self.unsubmitted: list[Job] = []
        self.stores: list[tuple[int, Job]] = []
        self.loads: list[tuple[int, Job]] = []

    def run(self, step: int, loads: list[Job], stores: list[Job], flush: list[int]) -> list[Job]:
        """One step of it; the jobs that are done."""
        at_once = [job for job in stores if job.id in flush]
        for job in self.unsubmitted + at_once:
            self.stores.append((step + self.store_steps, job))
        self.unsubmitted = [job for job in stores if job.id not in flush]
        self.loads += [(step + self.load_steps, job) for job in loads]
        flushed = max((place for place, (_, job) in enumerate(self.stores, 1) if job.id in flush), default=0)
        done = [job for _, job in self.stores[:flushed]]
        del self.stores[:flushed]
        for queue in (self.stores, self.loads):
            while queue and queue[0][0] <= step:
                done.append(queue.pop(0)[1])
        return done


class OffloadModel(VllmModel):
    """The scheduler with its connector."""

    def __init__(self, config: Mapping[str, Any], offload: Mapping[str, Any], release: Release) -> None:
        super().__init__(config, release.profile)
        self.release = release
        self.connector = Connector(self.config, offload, release)
        self.worker = Worker(offload["store_steps"], offload["load_steps"])
        self.skipped: list[Request] = []  # a014e35f: all that were skipped; 0.32: those that hold blocks
        self.loading: set[Request] = set()
        self.loaded: set[Request] = set()  # reported, not yet promoted
        self.in_flight_prefills: list[Request] = []
        self.scheduled_steps = 0
        self.processed_steps = 0
        self.last_step: dict[Request, int] = {}
        self.deferred: list[tuple[int, list[Block]]] = []
        self.orphans: list[Request] = []  # aborted while loading: blocks are kept
        self._reports: dict[Plan, list[Job]] = {}
        self._prefixes: dict[int, tuple[int, ...]] = {}

    # --- requests -----------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        self.connector.tracked.setdefault(request, Tracked(request))
        super()._enqueue(request)

    def has(self, request_id: str) -> bool:
        return super().has(request_id) or any(request.id == request_id for request in self.skipped)

    def cancel(self, request_id: str) -> None:
        for queue in (self.running, self.waiting, self.skipped):
            for request in queue:
                if request.id == request_id:
                    queue.remove(request)
                    self.connector.tracked[request].aborted = True
                    keep = request in self.loading and request not in self.loaded
                    self.loading.discard(request)
                    self.loaded.discard(request)
                    request.status = "finished"
                    self._end(request)
                    if keep:
                        self.orphans.append(request)
                    else:
                        self._free(request)
                    return
        raise KeyError(request_id)

    def _end(self, request: Request) -> None:
        if request in self.in_flight_prefills:
            self.in_flight_prefills.remove(request)
        self.connector.end(request)

    def _free(self, request: Request) -> None:
        if self._free_at_once(request):
            super()._free(request)
            return
        if request.table:
            self.deferred.append((self.scheduled_steps, request.table))
        request.table = []
        request.keyed = 0

    def _free_at_once(self, request: Request) -> bool:
        """Whether no step in flight writes to its blocks."""
        return not self.config.async_scheduling or self.last_step.get(request, 0) <= self.processed_steps

    # --- schedule -----------------------------------------------------------------------------------------

    def _schedule(self) -> Plan:
        self.connector.begin()
        plan = super()._schedule()
        stores, flush = self.connector.conclude(plan)
        if plan.scheduled:
            self.scheduled_steps += 1
        for request in plan.scheduled:
            self.last_step[request] = self.scheduled_steps
            if request in plan.samples and request in self.in_flight_prefills:
                self.in_flight_prefills.remove(request)
        self._reports[plan] = self.worker.run(self.steps, self.connector.load_jobs, stores, flush)
        return plan

    def _spared(self, victim: Request) -> bool:
        return self.release.spares_in_flight and not self._free_at_once(victim)

    def _preempt(self, victim: Request, plan: Plan) -> None:
        if victim in self.in_flight_prefills:
            self.in_flight_prefills.remove(victim)
        super()._preempt(victim, plan)

    def _there(self) -> int:
        return super()._there() + len(self.skipped)

    def _next_queue(self) -> list[Request]:
        if not self.skipped or not self.waiting:
            return self.skipped or self.waiting
        if self.release.holders_first or self.config.policy == "fcfs":
            return self.skipped
        return self.waiting if _order(self.waiting[0]) < _order(self.skipped[0]) else self.skipped

    def _admit(self, plan: Plan) -> None:
        passed: list[Request] = []
        while (
            (queue := self._next_queue()) and plan.budget > 0 and len(self.running) < self.config.max_num_seqs
        ):
            request = queue[0]
            if request in self.loading:
                if request not in self.loaded:
                    passed.append(queue.pop(0))
                    continue
                self._promote(request)
            hits: list[Block] = []
            external = 0
            if request.computed == 0:
                hits = self.pool.find(request.tokens)
                found = self.connector.lookup(request, len(hits) * self.config.block_size)
                self.connector.line["lookups"].append([request.id, len(hits) * self.config.block_size, found])
                if found is None:
                    passed.append(queue.pop(0))
                    continue
                external = found
            local = len(hits) * self.config.block_size
            if external > 0:
                if not self._allocate_load(request, hits, external):
                    break
                self.connector.start_load(request, local, external)
                request.computed = local + external
                self.loading.add(request)
                self.in_flight_prefills.append(request)
                passed.append(queue.pop(0))
                continue
            start = request.computed or local
            count = self._capped(len(request.tokens) - start, plan)
            if count > plan.budget and not self.config.enable_chunked_prefill:
                break
            count = min(count, plan.budget)
            phantoms = sum(block.phantom for block in hits)
            if not self._allocate(request, count, hits, admission=True):
                break
            self.phantom_hit_blocks += phantoms
            queue.pop(0)
            self._start(request, start, count, plan)
            if start + count < len(request.tokens) and request not in self.in_flight_prefills:
                self.in_flight_prefills.append(request)
        self._requeue(passed)

    def _requeue(self, passed: list[Request]) -> None:
        """Who was passed over goes in front again, in the old order."""
        if self.release.holders_first:
            holders = [request for request in passed if request.computed > 0]
            self.skipped[:0] = holders
            self.waiting[:0] = [request for request in passed if request not in holders]
        else:
            self.skipped[:0] = passed
        if self.config.policy == "priority":
            self.skipped.sort(key=_order)
            self.waiting.sort(key=_order)

    def _promote(self, request: Request) -> None:
        """Its blocks have come: they get their keys."""
        self._store_full_blocks(request, request.computed)
        if request.computed == len(request.tokens):
            request.computed -= 1  # one token to sample from
        self.loading.discard(request)
        self.loaded.discard(request)

    def _allocate_load(self, request: Request, hits: list[Block], external: int) -> bool:
        """Room for what will be loaded, and for all that others in progress still lack."""
        config, pool = self.config, self.pool
        total = len(hits) * config.block_size + external
        extra = sum(block.refs == 0 for block in hits)
        if self.running:
            extra += int(config.watermark * config.num_blocks)
        whole = max(0, self._blocks_for(len(request.tokens)) - len(hits))
        if config.scheduler_reserve_full_isl and whole + extra > pool.free_count():
            return False
        reserved = sum(
            max(0, self._blocks_for(len(other.tokens)) - len(other.table))
            for other in self.in_flight_prefills
        )
        missing = max(0, self._blocks_for(total) - len(hits))
        if missing + extra > pool.free_count() - reserved:
            return False
        pool.take_hits(hits)
        request.table = hits + pool.take_free(missing)
        request.keyed = len(hits)
        return True

    # --- update -------------------------------------------------------------------------------------------

    def _update(self, plan: Plan) -> list[Request]:
        if plan.scheduled:
            self.processed_steps += 1
            while self.deferred and self.deferred[0][0] <= self.processed_steps:
                self.pool.release(self.deferred.pop(0)[1])
        finished = super()._update(plan)
        reports = self._reports.pop(plan)
        self.connector.line["jobs_done"] = [job.id for job in reports]
        for job in reports:
            self.connector.done(job)
        for job in reports:
            if not job.is_store:
                if job.request in self.orphans:
                    self.orphans.remove(job.request)
                    self._free(job.request)
                else:
                    self.loaded.add(job.request)
        return finished

    def _retire(self, request: Request, was_preempted: bool) -> None:
        self._end(request)
        self._free(request)
        if was_preempted:
            (self.waiting if request in self.waiting else self.skipped).remove(request)

    def step(self, mid: Callable[[], None] = lambda: None) -> Any:
        host = self.connector.host
        host.evicted = []
        record: dict[str, Any] = dict(super().step(mid))
        queue = self.skipped + self.waiting
        record["waiting"] = len(queue)
        record["waiting_head"] = [request.id for request in queue[:4]]
        chunks = host.policy.chunks
        oldest = host.policy.oldest()
        record |= {"jobs_done": [], **self.connector.line}
        received = not self.config.async_scheduling or record["step"] > 0
        record |= {
            "loading": [request.id for request in queue if request in self.loading],
            "evicted": host.evicted,
            "host_events": host.events if received else [],
            "host_chunks": len(chunks),
            "host_ready": sum(chunk.ready for chunk in chunks.values()),
            "host_lru": None if oldest is None else oldest[:8],
        }
        if received:
            host.events = []
        for event in record["kv_events"]:
            if event["type"] == "stored":
                event["tokens"] = [self._prefix(number) for number in event["h"]]
        return record

    def _prefix(self, number: int) -> tuple[int, ...]:
        """The tokens up to the end of the block with that number."""
        if number not in self._prefixes:
            parent, tokens = next(content for content, key in self.pool.contents.items() if key == number)
            self._prefixes[number] = (() if parent is None else self._prefix(parent)) + tokens
        return self._prefixes[number]


def _order(request: Request) -> tuple[int, float, str]:
    return request.priority, request.arrival_time, request.id


def run_offload(scenario: Mapping[str, Any], release: Release) -> Iterator[dict[str, Any]]:
    """The lines of the scenario's recording after its header, chunks still named by their tokens."""
    model = OffloadModel(scenario["config"], scenario["offload"], release)
    requests = scenario["requests"]
    to_come = list(enumerate(requests))
    ended = 0
    while model.steps < scenario["max_steps"] and (ended < len(requests) or model.connector.busy):
        for index, spec in to_come:
            if spec.get("arrival_step", model.steps + 1) <= model.steps:
                model.add(spec, index)
        to_come = [
            (index, spec)
            for index, spec in to_come
            if spec.get("arrival_step", model.steps + 1) > model.steps
        ]
        aborted = abort_due(model, scenario, "before")
        record = model.step(lambda: aborted.extend(abort_due(model, scenario, "mid")))  # noqa: B023
        record["aborted"] = aborted
        ended += len(record["finished"]) + len(aborted)
        yield record


def named(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same lines with chunks named as a recording names them.

    The number of a chunk is that of its last block among the device's events over the whole file; below 0, in order of
    appearance, where the device never told of that block.
    """
    numbers: dict[Hashable, int] = {}
    for line in lines:
        for event in line["kv_events"]:
            numbers |= dict(zip(event.get("tokens", []), event["h"], strict=False))

    def number(keys: list[Hashable]) -> list[int]:
        for key in keys:
            numbers.setdefault(key, -1 - sum(value < 0 for value in numbers.values()))
        return [numbers[key] for key in keys]

    out = []
    for line in lines:
        jobs = {kind: [job | {"h": number(job["h"])} for job in line[kind]] for kind in ("loads", "stores")}
        out.append(
            line
            | jobs
            | {
                "kv_events": [
                    {k: v for k, v in event.items() if k != "tokens"} for event in line["kv_events"]
                ],
                "evicted": number(line["evicted"]),
                "host_events": [event | {"h": number(event["h"])} for event in line["host_events"]],
                "host_lru": None if line["host_lru"] is None else number(line["host_lru"]),
            }
        )
    return out

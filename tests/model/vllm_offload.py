"""A slow, obvious model of vLLM's native host offload: the scheduler model with an OffloadingConnector.

`run_offload` turns a scenario of `golden/vllm-offload` into the lines of its recording. Chunks are named by the
tokens up to their end; the recording's numbers are given at the end, as the recorder gave them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .vllm_config import RECORDED, V0_31, Profile
from .vllm_host import Access, HostTier
from .vllm_scheduler import Plan, Request, VllmModel

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from .vllm_blocks import Block


@dataclass(frozen=True)
class Release:
    """What differs between releases in offloading, beside their schedulers."""

    profile: Profile
    touches: bool  # lookups and stores make chunks young; else the end of a request does
    stores_last_token: bool  # a finished request offers its last token too, which nobody computed
    holders_first: bool  # waiting requests that hold blocks have a queue of their own, served first
    spares_in_flight: bool  # a victim whose step is in flight is not preempted
    arc_falls_back: bool  # where no chunk seen again may go, one seen once does


RELEASES = {
    "recorded": Release(RECORDED, True, True, False, False, False),
    "v0.28": Release(RECORDED, True, True, False, False, False),
    "v0.29": Release(RECORDED, True, True, False, False, False),
    "v0.30": Release(RECORDED, True, False, False, True, True),
    "v0.31": Release(V0_31, False, False, True, True, True),
    "v0.32.0": Release(V0_31, False, False, True, True, True),
}


@dataclass(eq=False)
class Job:
    """A transfer."""

    id: int
    request: Request
    keys: list[Hashable]
    is_store: bool
    gpu: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Tracked:
    """What the connector knows of a request."""

    request: Request
    keys: int = 0  # chunks that have a name
    blocks: list[int] = field(default_factory=list)  # as the last schedules told them
    next_stored: int = 0
    jobs: dict[int, Job] = field(default_factory=dict)
    access: Access = field(default_factory=Access)
    local: int = 0
    aborted: bool = False
    signalled: bool = False


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
        self.chunk_blocks: int = offload["blocks_per_chunk"]
        self.chunk: int = self.config.block_size * self.chunk_blocks
        self.prompt_only: bool = offload["offload_prompt_only"]
        self.host = HostTier(
            offload["host_chunks"], offload["eviction_policy"], release.touches, release.arc_falls_back
        )
        self.worker = Worker(offload["store_steps"], offload["load_steps"])
        self.skipped: list[Request] = []  # a014e35f: all that were skipped; 0.32: those that hold blocks
        self.tracked: dict[Request, Tracked] = {}
        self.loading: set[Request] = set()
        self.loaded: set[Request] = set()  # reported, not yet promoted
        self.in_flight_prefills: list[Request] = []
        self.ended: list[Request] = []  # since the last schedule
        self.jobs: dict[int, Job] = {}
        self.next_job = 0
        self.chunks_loading: set[Hashable] = set()
        self.fenced: dict[int, set[int]] = {}  # block -> store jobs of requests that ended
        self.scheduled_steps = 0
        self.processed_steps = 0
        self.last_step: dict[Request, int] = {}
        self.deferred: list[tuple[int, list[Block]]] = []
        self.line: dict[str, Any] = {}
        self.orphans: list[Request] = []  # aborted while loading: blocks are kept
        self.new_blocks: dict[Request, list[int]] = {}
        self.allocated: set[int] = set()
        self.load_jobs: list[Job] = []
        self._reports: dict[Plan, list[Job]] = {}
        self._prefixes: dict[int, tuple[int, ...]] = {}

    # --- requests -----------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        self.tracked.setdefault(request, Tracked(request))
        super()._enqueue(request)

    def has(self, request_id: str) -> bool:
        return super().has(request_id) or any(request.id == request_id for request in self.skipped)

    def cancel(self, request_id: str) -> None:
        for queue in (self.running, self.waiting, self.skipped):
            for request in queue:
                if request.id == request_id:
                    queue.remove(request)
                    self.tracked[request].aborted = True
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
        """The connector hears that a request has ended, before its blocks are freed."""
        if request in self.in_flight_prefills:
            self.in_flight_prefills.remove(request)
        tracked = self.tracked[request]
        tracked.keys = len(request.tokens) // self.chunk
        for job in tracked.jobs.values():
            for block in job.gpu if job.is_store else []:
                self.fenced.setdefault(block, set()).add(job.id)
        self.ended.append(request)

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
        self.line = {
            "lookups": [],
            "external": {},
            "loads": [],
            "stores": [],
            "store_failed": [],
            "flush": [],
        }
        self.allocated = set()
        self.load_jobs = []
        plan = super()._schedule()
        self.ended.sort(
            key=lambda request: request.index
        )  # a set in vLLM; recordings pin the scenario's order
        self._follow(plan)
        flush = self._fences(plan)
        store_jobs = self._stores(plan, flush)
        self.line["flush"] = sorted(flush)
        for request in self.ended:
            tracked = self.tracked[request]
            tracked.signalled = True
            self.host.policy.ended(tracked.access)
            if not tracked.jobs:
                del self.tracked[request]
        self.ended = []
        if plan.scheduled:
            self.scheduled_steps += 1
        for request in plan.scheduled:
            self.last_step[request] = self.scheduled_steps
            if request in plan.samples and request in self.in_flight_prefills:
                self.in_flight_prefills.remove(request)
        self._reports[plan] = self.worker.run(self.steps, self.load_jobs, store_jobs, sorted(flush))
        return plan

    def _schedule_running(self, plan: Plan) -> None:
        cursor = 0
        while cursor < len(self.running) and plan.budget > 0:
            request = self.running[cursor]
            count = self._next_tokens(request, plan)
            if count == 0:
                cursor += 1
                continue
            keyed_before = request.keyed
            before = len(request.table)
            while not self._allocate(request, count, hits=[], admission=False):
                victim = self._choose_victim()
                if self.release.spares_in_flight and not self._free_at_once(victim):
                    return
                if self.running.index(victim) < cursor:
                    cursor -= 1
                self._preempt(victim, plan)
                if victim is request:
                    return
            plan.keyed_before[request] = keyed_before
            plan.scheduled[request] = count
            self.new_blocks[request] = [block.id for block in request.table[before:]]
            plan.budget -= count
            cursor += 1

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
                found = self._lookup(request, len(hits) * self.config.block_size)
                self.line["lookups"].append([request.id, len(hits) * self.config.block_size, found])
                if found is None:
                    passed.append(queue.pop(0))
                    continue
                external = found
            local = len(hits) * self.config.block_size
            if external > 0:
                if not self._allocate_load(request, hits, external):
                    break
                self._start_load(request, local, external)
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
            self.running.append(request)
            (plan.new if request.status == "new" else plan.resumed).append(request)
            request.status = "running"
            request.computed = start
            plan.cached[request] = start
            plan.scheduled[request] = count
            self.new_blocks[request] = [block.id for block in request.table]
            if start + count < len(request.tokens) and request not in self.in_flight_prefills:
                self.in_flight_prefills.append(request)
            plan.budget -= count
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

    # --- connector ----------------------------------------------------------------------------------------

    def _key(self, request: Request, position: int) -> Hashable:
        return tuple(request.tokens[: (position + 1) * self.chunk])

    def _keys(self, request: Request, first: int, end: int) -> list[Hashable]:
        return [self._key(request, position) for position in range(first, end)]

    def _lookup(self, request: Request, local: int) -> int | None:
        tracked = self.tracked[request]
        tracked.blocks = []
        if tracked.jobs:
            return None
        tracked.keys = len(request.tokens) // self.chunk
        tracked.local = local
        found = self._scan(request, local, tracked.keys)
        self.host.touch(self._keys(request, 0, tracked.keys))
        return found

    def _scan(self, request: Request, local: int, chunks: int) -> int | None:
        if chunks * self.chunk - local < self.chunk:
            return 0
        start = local // self.chunk
        found = 0
        pending = False
        for key in self._keys(request, start, chunks):
            chunk = self.host.get(key)
            if chunk is None:
                break
            pending |= not chunk.ready
            found += 1
        if pending:
            return None
        hit = (start + found) * self.chunk - local
        if found == 0 or hit < self.chunk:
            return 0
        if any(key in self.chunks_loading for key in self._keys(request, start, start + found)):
            return None
        return hit

    def _start_load(self, request: Request, local: int, external: int) -> None:
        tracked = self.tracked[request]
        first, end = local // self.chunk, -(-(local + external) // self.chunk)
        keys = self._keys(request, first, end)
        table = [block.id for block in request.table]
        self.allocated.update(table)
        tracked.next_stored = end
        slots = self.host.prepare_load(keys, first, tracked.access)
        job = self._new_job(request, keys, is_store=False)
        if self.config.enable_prefix_caching:
            self.chunks_loading.update(keys)
        self.load_jobs.append(job)
        self.line["external"][request.id] = external
        self.line["loads"].append(
            {
                "job": job.id,
                "req": request.id,
                "chunks": list(range(first, end)),
                "h": keys,
                "gpu": table[local // self.config.block_size :],
                "host": slots,
                "table": table,
            }
        )

    def _new_job(self, request: Request, keys: list[Hashable], is_store: bool) -> Job:
        job = Job(self.next_job, request, keys, is_store)
        self.next_job += 1
        self.jobs[job.id] = job
        self.tracked[request].jobs[job.id] = job
        return job

    def _follow(self, plan: Plan) -> None:
        """The connector hears of every scheduled request and its new blocks."""
        self.line["blocks"] = {}
        for request in plan.scheduled:
            tracked = self.tracked[request]
            tracked.keys = len(request.tokens) // self.chunk
            if request in plan.new or request in plan.resumed:
                tracked.blocks = []
            fresh = self.new_blocks[request]
            tracked.blocks += fresh
            self.allocated.update(fresh)
            if fresh:
                self.line["blocks"][request.id] = fresh
        self.new_blocks = {}

    def _fences(self, plan: Plan) -> set[int]:
        """Jobs that must end before this step: of those preempted, and those whose blocks are given away."""
        flush: set[int] = set()
        for request in plan.preempted:
            flush.update(self.tracked[request].jobs)
        for block in self.allocated:
            flush |= self.fenced.get(block, set())
        return flush

    def _stores(self, plan: Plan, flush: set[int]) -> list[Job]:
        jobs = []
        for request in [*plan.scheduled, *self.ended]:
            tracked = self.tracked[request]
            size = len(request.tokens)
            if tracked.aborted:
                after = request.computed
            elif request.status == "finished":
                after = size if self.release.stores_last_token else max(request.prompt_tokens, size - 1)
            else:
                after = request.computed
            after = min(after, size)
            if self.prompt_only:
                after = min(after, request.prompt_tokens)
            end = min(after // self.chunk, len(tracked.blocks) // self.chunk_blocks)
            first = tracked.next_stored
            offered = self._keys(request, first, end)
            stored = self.host.prepare_store(offered, first, tracked.access) if offered else []
            if stored is None:
                self.line["store_failed"].append(request.id)
                continue
            tracked.next_stored = max(first, end)
            if not stored:
                continue
            self.host.touch(self._keys(request, 0, tracked.keys))
            keys = [key for key, _ in stored]
            job = self._new_job(request, keys, is_store=True)
            places = [first + offered.index(key) for key in keys]
            for place in places:
                job.gpu += tracked.blocks[place * self.chunk_blocks : (place + 1) * self.chunk_blocks]
            jobs.append(job)
            self.line["stores"].append(
                {
                    "job": job.id,
                    "req": request.id,
                    "chunks": places,
                    "h": keys,
                    "gpu": job.gpu,
                    "host": [slot for _, slot in stored],
                }
            )
            if request.status == "finished":
                for block in job.gpu:
                    self.fenced.setdefault(block, set()).add(job.id)
                    if block in self.allocated:
                        flush.add(job.id)
        return jobs

    # --- update -------------------------------------------------------------------------------------------

    def _update(self, plan: Plan) -> list[Request]:
        if plan.scheduled:
            self.processed_steps += 1
            while self.deferred and self.deferred[0][0] <= self.processed_steps:
                self.pool.release(self.deferred.pop(0)[1])
        finished = super()._update(plan)
        reports = self._reports.pop(plan)
        self.line["jobs_done"] = [job.id for job in reports]
        for job in reports:
            self._done(job)
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

    def _done(self, job: Job) -> None:
        if job.is_store:
            self.host.store_done(job.keys)
        else:
            self.host.load_done(job.keys)
            self.chunks_loading.difference_update(job.keys)
        for block in job.gpu:
            jobs = self.fenced.get(block, set())
            jobs.discard(job.id)
            if not jobs:
                self.fenced.pop(block, None)
        del self.jobs[job.id]
        tracked = self.tracked[job.request]
        del tracked.jobs[job.id]
        if tracked.signalled and not tracked.jobs:
            del self.tracked[job.request]

    def step(self, mid: Callable[[], None] = lambda: None) -> Any:
        self.host.evicted = []
        self.new_blocks = {}
        record: dict[str, Any] = dict(super().step(mid))
        queue = self.skipped + self.waiting
        record["waiting"] = len(queue)
        record["waiting_head"] = [request.id for request in queue[:4]]
        chunks = self.host.policy.chunks
        oldest = self.host.policy.oldest()
        record |= {"jobs_done": [], **self.line}
        received = not self.config.async_scheduling or record["step"] > 0
        record |= {
            "loading": [request.id for request in queue if request in self.loading],
            "evicted": self.host.evicted,
            "host_events": self.host.events if received else [],
            "host_chunks": len(chunks),
            "host_ready": sum(chunk.ready for chunk in chunks.values()),
            "host_lru": None if oldest is None else oldest[:8],
        }
        if received:
            self.host.events = []
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
    while (ended < len(requests) or model.ended or model.jobs) and model.steps < scenario["max_steps"]:
        for index, spec in to_come:
            if spec.get("arrival_step", model.steps + 1) <= model.steps:
                model.add(spec, index)
        to_come = [
            (index, spec)
            for index, spec in to_come
            if spec.get("arrival_step", model.steps + 1) > model.steps
        ]
        aborted: list[str] = []

        def abort(when: str) -> None:
            for item in scenario.get("aborts", []):
                if (item["step"], item["when"]) == (model.steps, when) and model.has(item["id"]):
                    model.cancel(item["id"])
                    aborted.append(item["id"])  # noqa: B023

        abort("before")
        record = model.step(lambda: abort("mid"))
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

"""A slow, obvious model of vLLM's OffloadingConnector: which chunks are looked up, loaded and stored for whom.

The scheduler that asks it is in vllm_offload.py. Chunks are named by the tokens up to their end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .vllm_config import RECORDED, V0_31, Config, Profile
from .vllm_host import Access, HostTier

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from .vllm_requests import Plan, Request


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


class Connector:
    """What the scheduler tells and asks: requests as they come, are scheduled and end, and their blocks."""

    def __init__(self, config: Config, offload: Mapping[str, Any], release: Release) -> None:
        self.config, self.release = config, release
        self.chunk_blocks: int = offload["blocks_per_chunk"]
        self.chunk: int = config.block_size * self.chunk_blocks
        self.prompt_only: bool = offload["offload_prompt_only"]
        self.host = HostTier(
            offload["host_chunks"], offload["eviction_policy"], release.touches, release.arc_falls_back
        )
        self.tracked: dict[Request, Tracked] = {}
        self.ended: list[Request] = []  # since the last schedule
        self.jobs: dict[int, Job] = {}
        self.next_job = 0
        self.chunks_loading: set[Hashable] = set()
        self.fenced: dict[int, set[int]] = {}  # block -> store jobs of requests that ended
        # Of one step:
        self.line: dict[str, Any] = {}  # as the recording has it
        self.allocated: set[int] = set()
        self.load_jobs: list[Job] = []

    @property
    def busy(self) -> bool:
        """Whether somebody's end is still to be told, or a transfer under way."""
        return bool(self.ended or self.jobs)

    def begin(self) -> None:
        """A schedule begins."""
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

    def lookup(self, request: Request, local: int) -> int | None:
        """Tokens behind the `local` ones that the host has; None: ask again in the next step."""
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

    def start_load(self, request: Request, local: int, external: int) -> None:
        """Load what was found into the blocks that the request has got for it."""
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

    def conclude(self, plan: Plan) -> tuple[list[Job], list[int]]:
        """A schedule is made: the stores that it begins, and the jobs that must end before its step."""
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
        return store_jobs, sorted(flush)

    def _follow(self, plan: Plan) -> None:
        """Hear of every scheduled request and its new blocks."""
        self.line["blocks"] = {}
        for request in plan.scheduled:
            tracked = self.tracked[request]
            tracked.keys = len(request.tokens) // self.chunk
            if request in plan.new or request in plan.resumed:
                tracked.blocks = []
            fresh = [block.id for block in plan.new_blocks[request]]
            tracked.blocks += fresh
            self.allocated.update(fresh)
            if fresh:
                self.line["blocks"][request.id] = fresh

    def _fences(self, plan: Plan) -> set[int]:
        """Jobs that must end before this step: of those preempted, and those whose blocks are given away."""
        flush: set[int] = set()
        for request in plan.preempted:
            flush.update(self.tracked[request].jobs)
        for block in self.allocated:
            flush |= self.fenced.get(block, set())
        return flush

    def _stores(self, plan: Plan, flush: set[int]) -> list[Job]:
        """The copies that begin; those of blocks that are given away already are added to `flush`."""
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

    def end(self, request: Request) -> None:
        """A request has ended; its blocks are freed after this."""
        tracked = self.tracked[request]
        tracked.keys = len(request.tokens) // self.chunk
        for job in tracked.jobs.values():
            for block in job.gpu if job.is_store else []:
                self.fenced.setdefault(block, set()).add(job.id)
        self.ended.append(request)

    def done(self, job: Job) -> None:
        """A transfer was reported."""
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

    def _new_job(self, request: Request, keys: list[Hashable], is_store: bool) -> Job:
        job = Job(self.next_job, request, keys, is_store)
        self.next_job += 1
        self.jobs[job.id] = job
        self.tracked[request].jobs[job.id] = job
        return job

    def _key(self, request: Request, position: int) -> Hashable:
        return tuple(request.tokens[: (position + 1) * self.chunk])

    def _keys(self, request: Request, first: int, end: int) -> list[Hashable]:
        return [self._key(request, position) for position in range(first, end)]

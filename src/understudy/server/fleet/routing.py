"""Where the front door sends a request, and why.

A policy is a router of the replay's kind, `choose(request, view)`: one written for a replay works here unchanged.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from understudy.errors import ConfigError
from understudy.router import PrefixIndex

if TYPE_CHECKING:
    import numpy.typing as npt

    from understudy._core import EventBatch, Identities
    from understudy.server.server import Server

POLICIES = ("round_robin", "random", "least_loaded", "kv")
TIER_CREDIT = (1.0, 0.75, 0.25, 0.0)
"""What a cached block is worth on the device, the host, a disk and an object store."""


class LiveRequestView(NamedTuple):
    """What a router may know of a request."""

    row: int
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    priority: int
    block_size: int
    prompt_blocks: Identities | None


class LiveFleetView:
    """What a router may know of the workers, as of now."""

    def __init__(self, servers: list[Server]) -> None:
        self._servers = servers

    def __len__(self) -> int:
        return len(self._servers)

    @property
    def now_ns(self) -> int:
        """The workers' clock."""
        return self._servers[0].stage.clock.now_ns()

    @property
    def outstanding_requests(self) -> npt.NDArray[np.int64]:
        """Requests that were sent to each worker and have not ended."""
        return np.array([len(server.app.endpoints.in_flight) for server in self._servers], dtype=np.int64)

    @property
    def outstanding_tokens(self) -> npt.NDArray[np.int64]:
        """Their tokens, prompt and output."""
        sums = [
            sum(
                one.prompt_tokens + sum(choice.plan.total for choice in one.choices)
                for one in server.app.endpoints.in_flight
            )
            for server in self._servers
        ]
        return np.array(sums, dtype=np.int64)

    @property
    def running(self) -> npt.NDArray[np.int64]:
        """Requests in each worker's batch."""
        return self._counts("num_running")

    @property
    def waiting(self) -> npt.NDArray[np.int64]:
        """Requests in each worker's queue."""
        return self._counts("num_waiting")

    @property
    def used_blocks(self) -> npt.NDArray[np.int64]:
        """Blocks that requests hold on each worker's device."""
        sums = [sum(core.engine.pool[1] for core in server.worker.cores) for server in self._servers]
        return np.array(sums, dtype=np.int64)

    @property
    def total_blocks(self) -> npt.NDArray[np.int64]:
        """Blocks of each worker's device."""
        sums = [server.settings.engine.num_gpu_blocks * len(server.worker.cores) for server in self._servers]
        return np.array(sums, dtype=np.int64)

    def _counts(self, name: str) -> npt.NDArray[np.int64]:
        sums = [sum(getattr(core, name) for core in server.worker.cores) for server in self._servers]
        return np.array(sums, dtype=np.int64)


class LiveRouter(Protocol):
    """A router's `choose`."""

    def choose(self, request: LiveRequestView, view: LiveFleetView) -> int:
        """The worker of the request."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: LiveRequestView, view: LiveFleetView) -> int:  # noqa: ARG002
        """The next."""
        chosen = self._next % len(view)
        self._next += 1
        return chosen


class Random:
    """Any, by the seed."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def choose(self, request: LiveRequestView, view: LiveFleetView) -> int:  # noqa: ARG002
        """Whichever is drawn."""
        return self._draw.randrange(len(view))


class LeastLoaded:
    """Whoever has the fewest tokens outstanding."""

    def choose(self, request: LiveRequestView, view: LiveFleetView) -> int:  # noqa: ARG002
        """The first of the least loaded."""
        return int(np.argmin(view.outstanding_tokens))


class KvAware:
    """The cheapest worker in blocks: what it would have to compute for the request, plus what it already has to do.

    Knows the workers' caches from their events alone.
    """

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.overlap_blocks = 0
        self._turn = 0

    def observe(self, worker: int, rank: int, batch: EventBatch) -> None:
        """A step of a worker stored or removed blocks."""
        self.index.apply(worker, batch, dp_rank=rank)

    def forget(self, worker: int) -> None:
        """A worker holds nothing any more."""
        self.index.clear(worker)

    def choose(self, request: LiveRequestView, view: LiveFleetView) -> int:
        """The cheapest; among equals they take turns."""
        overlap = np.zeros(len(view))
        if request.prompt_blocks is not None and len(request.prompt_blocks):
            found = self.index.find(request.prompt_blocks.sequence_hashes)
            for (worker, _), tiers in zip(found.workers, found.blocks.tolist(), strict=True):
                if worker < len(view):
                    credit = sum(weight * blocks for weight, blocks in zip(TIER_CREDIT, tiers, strict=True))
                    overlap[worker] = max(overlap[worker], credit)
        own = -(-request.prompt_tokens // request.block_size) - overlap
        cost = own + view.outstanding_tokens / request.block_size
        cheapest = np.flatnonzero(cost == cost.min())
        self._turn += 1
        chosen = int(cheapest[self._turn % len(cheapest)])
        self.overlap_blocks = round(float(overlap[chosen]))
        return chosen


def make_router(name: str, seed: int) -> LiveRouter:
    """A policy by name. ConfigError lists the known ones."""
    match name:
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(seed)
        case "least_loaded":
            return LeastLoaded()
        case "kv":
            return KvAware()
    raise ConfigError(f"--routing {name!r} is not known; choose one of {', '.join(POLICIES)}")

"""A router's view of the workers of a fleet, and their events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.router.dispatch import Dispatcher
from understudy.router.outstanding import OutstandingWork

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from understudy._core import EventBatch
    from understudy.fleets.event_faults import DisturbedEvents
    from understudy.router.kv import KvRouting
    from understudy.router.router import Router
    from understudy.server.core import EngineCore
    from understudy.server.server import Server

UNLIMITED_TOKENS = 10_000_000
"""Token budget of a step without a limit, as in Dynamo."""


class FleetRouting:
    """One policy for the workers of a fleet; each rank of a worker is a target."""

    def __init__(self, servers: list[Server], policy: str | KvRouting | Router, seed: int) -> None:
        self.servers = servers
        self.targets: list[tuple[int, int]] = []
        """(server, rank) by the policy's worker number."""
        self._pools: list[int] = []
        self._roles: list[str] = []
        view = LiveFleetView(servers, self.targets, self._pools, self._roles)
        self.dispatcher = Dispatcher(policy, seed=seed, view=view)
        self._numbers: dict[tuple[int, int], int] = {}
        self._disturbed: DisturbedEvents | None = None

    def add(self, server: Server, index: int, pool: int) -> None:
        """Add a worker; `pool` is the number of its pool in the fleet's settings."""
        budget = server.settings.engine.max_num_batched_tokens or UNLIMITED_TOKENS
        groups = server.settings.engine.group_layout
        handoff = server.settings.handoff
        for rank in range(server.settings.data_parallel_size):
            self._numbers[index, rank] = self.dispatcher.add_worker(budget, groups)
            self.targets.append((index, rank))
            self._pools.append(pool)
            self._roles.append("both" if handoff is None else handoff.stage)
        if self.dispatcher.wants_events:
            server.worker.on_events = self._observe
            server.worker.on_restart = self._forget

    def disturb(self, disturbed: DisturbedEvents) -> None:
        """Let faults disturb the events of all workers, which have been added."""
        self._disturbed = disturbed
        for _ in self.targets:
            disturbed.add_worker()

    def numbers_of(self, server: int) -> list[int]:
        """Return the policy's numbers of a server's ranks."""
        return [number for number, (index, _) in enumerate(self.targets) if index == server]

    def update_availability(self) -> None:
        """Mark workers as unavailable that are dead, starting, draining or stopped."""
        for number, (server, _) in enumerate(self.targets):
            self.dispatcher.set_available(number, self.servers[server].app.takes_requests)

    def _observe(self, worker: int, rank: int, batch: EventBatch) -> None:
        number = self._numbers[worker, rank]
        if self._disturbed is None:
            self.dispatcher.observe(number, batch)
        else:
            self._disturbed.observe(number, batch)

    def _forget(self, worker: int) -> None:
        for number in self.numbers_of(worker):
            if self._disturbed is None:
                self.dispatcher.forget(number)
            else:
                self._disturbed.end(number)


class LiveFleetView(OutstandingWork):
    """Current state of the workers for a router: one value per rank."""

    def __init__(
        self, servers: list[Server], targets: list[tuple[int, int]], pools: list[int], roles: list[str]
    ) -> None:
        super().__init__()
        self._servers = servers
        self._targets = targets
        self._pools = pools
        self._roles = roles

    @property
    def now_ns(self) -> int:
        """Time of the workers' clock."""
        return self._servers[0].runtime.clock.now_ns()

    @property
    def pools(self) -> npt.NDArray[np.int64]:
        """Pool number per rank, in the order of the fleet's settings."""
        return np.array(self._pools, dtype=np.int64)

    @property
    def roles(self) -> tuple[str, ...]:
        """Stages of a request that each rank serves: both, prefill or decode."""
        return tuple(self._roles)

    @property
    def running(self) -> npt.NDArray[np.int64]:
        """Number of running requests per rank."""
        return self._each(lambda core: core.num_running)

    @property
    def waiting(self) -> npt.NDArray[np.int64]:
        """Number of queued requests per rank."""
        return self._each(lambda core: core.num_waiting)

    @property
    def used_blocks(self) -> npt.NDArray[np.int64]:
        """Device blocks that requests hold, per rank."""
        return self._each(lambda core: core.active_blocks)

    @property
    def total_blocks(self) -> npt.NDArray[np.int64]:
        """Device blocks per rank."""
        blocks = [self._servers[server].settings.engine.num_gpu_blocks for server, _ in self._targets]
        return np.array(blocks, dtype=np.int64)

    def _each(self, read: Callable[[EngineCore], int]) -> npt.NDArray[np.int64]:
        cores = (self._servers[server].worker.cores[rank] for server, rank in self._targets)
        return np.array([read(core) for core in cores], dtype=np.int64)

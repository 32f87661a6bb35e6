"""The workers of a fleet as its router sees them, and what they tell it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from understudy.router.dispatch import Dispatcher

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from understudy._core import EventBatch
    from understudy.router.kv import KvRouting
    from understudy.router.router import Router
    from understudy.server.core import EngineCore
    from understudy.server.server import Server

UNLIMITED_TOKENS = 10_000_000
"""The budget of a step that has none, as Dynamo counts it."""


class FleetRouting:
    """One policy for the workers of a fleet; each rank of a worker is a place of its own to it."""

    def __init__(self, servers: list[Server], policy: str | KvRouting | Router, seed: int) -> None:
        self.servers = servers
        self.targets: list[tuple[int, int]] = []
        """(server, rank), by the number that the policy knows it by."""
        self.dispatcher = Dispatcher(policy, seed=seed, view=LiveFleetView(servers, self.targets))
        self._numbers: dict[tuple[int, int], int] = {}

    def add(self, server: Server, index: int) -> None:
        """A worker that has been made."""
        budget = server.settings.engine.max_num_batched_tokens or UNLIMITED_TOKENS
        for rank in range(server.settings.data_parallel_size):
            self._numbers[index, rank] = self.dispatcher.add_worker(budget)
            self.targets.append((index, rank))
        if self.dispatcher.wants_events:
            server.worker.on_events = self._observe
            server.worker.on_restart = self._forget

    def look(self) -> None:
        """See who is dead."""
        for number, (server, _) in enumerate(self.targets):
            self.dispatcher.set_available(number, not self.servers[server].app.dead)

    def _observe(self, worker: int, rank: int, batch: EventBatch) -> None:
        self.dispatcher.observe(self._numbers[worker, rank], batch)

    def _forget(self, worker: int) -> None:
        for number, (server, _) in enumerate(self.targets):
            if server == worker:
                self.dispatcher.forget(number)


class LiveFleetView:
    """What a router may know of the workers, as of now: a number for each, or for each of its ranks."""

    def __init__(self, servers: list[Server], targets: list[tuple[int, int]]) -> None:
        self._servers = servers
        self._targets = targets

    def __len__(self) -> int:
        return len(self._targets)

    @property
    def now_ns(self) -> int:
        """The workers' clock."""
        return self._servers[0].stage.clock.now_ns()

    @property
    def outstanding_requests(self) -> npt.NDArray[np.int64]:
        """Requests that were sent to each worker and have not ended."""
        return self._each(lambda core: len(core.live))

    @property
    def outstanding_tokens(self) -> npt.NDArray[np.int64]:
        """Their tokens, prompt and output."""
        return self._each(lambda core: sum(one.prompt_tokens + one.max_tokens for one in core.live.values()))

    @property
    def running(self) -> npt.NDArray[np.int64]:
        """Requests in each worker's batch."""
        return self._each(lambda core: core.num_running)

    @property
    def waiting(self) -> npt.NDArray[np.int64]:
        """Requests in each worker's queue."""
        return self._each(lambda core: core.num_waiting)

    @property
    def used_blocks(self) -> npt.NDArray[np.int64]:
        """Blocks that requests hold on each worker's device."""
        return self._each(lambda core: core.engine.pool[1])

    @property
    def total_blocks(self) -> npt.NDArray[np.int64]:
        """Blocks of each worker's device."""
        blocks = [self._servers[server].settings.engine.num_gpu_blocks for server, _ in self._targets]
        return np.array(blocks, dtype=np.int64)

    def _each(self, read: Callable[[EngineCore], int]) -> npt.NDArray[np.int64]:
        cores = (self._servers[server].worker.cores[rank] for server, rank in self._targets)
        return np.array([read(core) for core in cores], dtype=np.int64)

"""Invariants of a live fleet, checked after each fault."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import InvariantViolated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.fleets.ledger import Ledger
    from understudy.fleets.routing import FleetRouting
    from understudy.server.core import EngineCore
    from understudy.server.server import Server

log = logging.getLogger("understudy.fleet")

KEPT_MISTAKES = 20


class FaultChecks:
    """Checks that no request is lost, that blocks are conserved, and that the router's index equals the engines."""

    def __init__(
        self,
        servers: Sequence[Server],
        routing: FleetRouting,
        ledger: Ledger,
        is_complete: Callable[[int], bool],
    ) -> None:
        """`is_complete`: whether the router has received all events of a worker, by the router's number."""
        self._servers = servers
        self._routing = routing
        self._ledger = ledger
        self._is_complete = is_complete
        self.checked = 0
        self.mistakes: list[str] = []
        """The first checks that failed."""
        self.num_mistakes = 0

    def check(self, workers: Sequence[int]) -> None:
        """Check these workers, each between two of its steps, and the requests of the front end."""
        self._note(self._ledger.find_mistake())
        for index in workers:
            worker = self._servers[index].worker
            for rank, core in enumerate(worker.cores):
                self.check_engine(core)
                worker.call_between_steps(core, lambda index=index, rank=rank: self._check_index(index, rank))  # type: ignore[misc]

    def check_engine(self, core: EngineCore) -> None:
        """Check requests, blocks and transfers of an engine, in order with its other inputs."""

        def check(_: int) -> None:
            self.checked += 1
            try:
                core.simulated.check()
            except InvariantViolated as error:
                self._note(f"{core.name}: {error}")

        self._servers[0].runtime.driver.enqueue(core, check)

    def _check_index(self, index: int, rank: int) -> None:
        """Compare the router's index with the blocks of an engine that has published all of its events."""
        known, core = self._routing.dispatcher.index, self._servers[index].worker.cores[rank]
        number = self._routing.numbers_of(index)[rank]
        caches = self._servers[index].settings.engine.caches_prefixes
        if known is None or not caches or not self._is_complete(number):
            return
        self.checked += 1
        workers, _, tiers, hashes = known.dump_columns()
        for tier, cached in core.simulated.list_cached():
            mine = hashes[(workers == number) & (tiers == int(tier))]
            if int(tier) <= 2 and not np.array_equal(np.sort(mine), np.unique(cached)):
                self._note(
                    f"worker {index}: the router's index has {len(mine)} blocks of tier {int(tier)}, the engine "
                    f"{len(np.unique(cached))}, or others"
                )

    def _note(self, mistake: str | None) -> None:
        if mistake is None:
            return
        self.num_mistakes += 1
        if len(self.mistakes) < KEPT_MISTAKES:
            self.mistakes.append(mistake)
        log.error("a check failed: %s", mistake)

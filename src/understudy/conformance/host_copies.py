"""A host's copies by ticks: two links, for stores and for loads, as recordings with several connectors have them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.conformance.handoff_scenario import HostSettings

Line = dict[str, Any]


@dataclass(slots=True)
class Copies:
    """One direction: copies run one after the other."""

    ticks: int
    blocks_per_tick: int | None
    free: int = 0
    running: list[tuple[int, int]] = field(default_factory=list)
    """(job, done) in the order of submission."""

    def submit(self, job: int, blocks: int, tick: int) -> tuple[int, int]:
        """Queue a copy; return it with the tick in which it is done."""
        duration = 0 if self.blocks_per_tick is None else -(-blocks // self.blocks_per_tick)
        self.free = max(tick, self.free) + duration
        self.running.append((job, self.free + self.ticks))
        return self.running[-1]

    def flush(self, jobs: Sequence[int], tick: int) -> None:
        """Wait for jobs: they, and all before them, are done now."""
        last = max((place for place, (job, _) in enumerate(self.running, 1) if job in jobs), default=0)
        waited = [(job, min(done, tick)) for job, done in self.running[:last]]
        self.running = waited + self.running[last:]

    def take_done(self, tick: int) -> list[int]:
        """Take the jobs that are done by now."""
        done = [job for job, when in self.running if when <= tick]
        self.running = [(job, when) for job, when in self.running if when > tick]
        return done


class HostCopies:
    """The worker's half of the offload of one instance."""

    def __init__(self, settings: HostSettings) -> None:
        self._stores = Copies(settings.store_ticks, settings.blocks_per_tick)
        self._loads = Copies(settings.load_ticks, settings.blocks_per_tick)
        self._announced: list[tuple[int, int]] = []
        """Stores of the schedule before, with their blocks."""
        self._loading: dict[int, int] = {}
        """Requests by job."""

    def run(self, logged: Line, tick: int) -> tuple[list[list[int]], list[int], list[int]]:
        """Run an iteration with the orders of its schedule.

        Returns the copies that were submitted with the ticks in which they are done, the jobs that are done, and the
        requests whose loads are.
        """
        flush = logged["flush"]
        orders = [(job["job"], len(job["device"])) for job in logged["stores"]]
        urgent = [order for order in orders if order[0] in flush]
        posted = [self._stores.submit(job, blocks, tick) for job, blocks in self._announced + urgent]
        self._announced = [order for order in orders if order[0] not in flush]
        self._stores.flush(flush, tick)
        self._loads.flush(flush, tick)
        for job in logged["loads"]:
            self._loading[job["job"]] = job["request"]
            posted.append(self._loads.submit(job["job"], len(job["device"]), tick))
        loaded = self._loads.take_done(tick)
        done = self._stores.take_done(tick) + loaded
        return [list(copy) for copy in posted], done, [self._loading.pop(job) for job in loaded]

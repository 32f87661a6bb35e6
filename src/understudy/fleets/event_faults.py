"""Faults on the way of KV events from the workers of a live fleet to its router."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from understudy._core import EventFaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import EventBatch
    from understudy._core import Fault as CoreFault
    from understudy.clock import Clock
    from understudy.router.dispatch import Dispatcher


class DisturbedEvents:
    """Passes the events of workers on to a router, as faults let them: the rules are those of a replay."""

    def __init__(self, faults: Sequence[CoreFault], seed: int, clock: Clock, dispatcher: Dispatcher) -> None:
        self._faults = EventFaults(list(faults), seed)
        self._clock = clock
        self._dispatcher = dispatcher
        self._start_ns = 0
        self._timers: dict[int, asyncio.TimerHandle] = {}

    def start(self, start_ns: int) -> None:
        """Set the time from which faults count."""
        self._start_ns = start_ns

    def add_worker(self) -> None:
        """Add a worker; they are numbered from 0."""
        self._faults.add_worker()

    def observe(self, worker: int, batch: EventBatch | None = None) -> None:
        """Take events of a worker, if any, and pass on those that are due."""
        arrived = self._faults.deliver(worker, self._now_ns(), batch)
        if len(arrived):
            self._dispatcher.observe(worker, arrived)
        self._call_when_due(worker)

    def reread(self, worker: int) -> None:
        """Let the router read all blocks of a worker anew."""
        self._pass_on(worker, self._faults.reread(worker))

    def forget(self, worker: int) -> None:
        """Let the router forget all blocks of a worker, which still has them."""
        self._faults.forget(worker)
        self._dispatcher.forget(worker)

    def end(self, worker: int) -> None:
        """Let the router forget a worker's blocks, because its cache is lost, and events under way with it."""
        self._faults.end(worker)
        self._dispatcher.forget(worker)

    def is_complete(self, worker: int) -> bool:
        """Return whether the router has received all that the worker has published."""
        return self._faults.is_complete(worker)

    def close(self) -> None:
        """Pass on nothing that was held back."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _now_ns(self) -> int:
        return self._clock.now_ns() - self._start_ns

    def _pass_on(self, worker: int, rows: EventBatch) -> None:
        if len(rows):
            self._dispatcher.observe(worker, rows)

    def _call_when_due(self, worker: int) -> None:
        due_ns = self._faults.next_due_ns(worker)
        if due_ns is None or due_ns > 1 << 60 or worker in self._timers:
            return

        def pass_on() -> None:
            del self._timers[worker]
            self.observe(worker)

        wait_s = max(due_ns - self._now_ns(), 0) / self._clock.speed / 1e9
        self._timers[worker] = asyncio.get_running_loop().call_later(wait_s, pass_on)

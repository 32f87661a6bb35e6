"""KV events that reach a router of one's own as late as those of real workers would."""

from __future__ import annotations

import struct
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import msgspec

from understudy._core import xxh3_64
from understudy.checks import positive_number, share
from understudy.errors import ConfigError
from understudy.router.router import has_own

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy._core import FleetView, KvEventBatch, RouteRequest
    from understudy.router.router import Router

DELIVERY_FIELDS = ("event_delay_ms", "event_period_ms", "event_loss")
"""Settings of the delivery of events; `KvRouting` has the same."""


class DelayedEvents(msgspec.Struct, frozen=True, eq=False):
    """A user-defined router whose `observe` is called late, in batches, or not for each step.

    For offline runs: the events of live workers have their real delays. Which events are lost depends on the seed of
    the run. Errors: ConfigError for a router without `observe`, and for a wrong value.

    Example:
        us.replay("trace.jsonl", workers=4, routing=DelayedEvents(MyRouter(), event_delay_ms=50.0, event_loss=0.01))
    """

    router: Router
    event_delay_ms: float = 0.0
    """Delay of KV events from the end of the step to the router, in ms."""
    event_period_ms: float = 0.0
    """Above 0: events are delivered in batches, at multiples of this time in ms."""
    event_loss: float = 0.0
    """Share of deliveries (one per step) that are lost, below 1."""

    def __post_init__(self) -> None:
        if not has_own(self.router, "observe"):
            raise ConfigError(
                f"{', '.join(self.settings) or DELIVERY_FIELDS[0]}: {type(self.router).__qualname__} receives no "
                "events; give it observe(batch), or leave this out"
            )
        for name in DELIVERY_FIELDS[:2]:
            value = positive_number(name, getattr(self, name), or_zero=True)
            msgspec.structs.force_setattr(self, name, float(value))
        loss = share("event_loss", self.event_loss, or_zero=True, or_one=False)
        msgspec.structs.force_setattr(self, "event_loss", float(loss))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the delivery that are not 0, by name."""
        return {name: value for name in DELIVERY_FIELDS if (value := getattr(self, name))}

    def due_ns(self, batch: KvEventBatch, seed: int) -> int | None:
        """Return when the router receives a batch; None: it is lost. Depends on the arguments only."""
        if self.event_loss > 0:
            source = batch.pool if batch.worker is None else batch.worker
            of_batch = struct.pack("<QqQ?", seed, batch.time_ns, source, batch.worker is None)
            if xxh3_64(of_batch) < self.event_loss * 2**64:
                return None
        due = batch.time_ns + round(self.event_delay_ms * 1e6)
        period = round(self.event_period_ms * 1e6)
        return due if period == 0 else -(-due // period) * period


class LateRouter:
    """Passes every call on to a router; batches of events as they are due, before the next choice."""

    first_token: Callable[[int], None]
    ended: Callable[[int], None]

    def __init__(self, router: Router, delivery: DelayedEvents, seed: int) -> None:
        """Wrap a router; methods that it does not override are absent here, so that they are not called."""
        self._router = router
        self._delivery = delivery
        self._seed = seed
        self._late: list[tuple[int, int, KvEventBatch]] = []
        """Heap of batches by the time at which they are due, then in order."""
        self._count = 0
        for name in ("first_token", "ended"):
            if has_own(router, name):
                setattr(self, name, getattr(router, name))

    def observe(self, batch: KvEventBatch) -> None:
        """Keep a batch until it is due, unless it is lost."""
        due_ns = self._delivery.due_ns(batch, self._seed)
        if due_ns is not None:
            self._count += 1
            heappush(self._late, (due_ns, self._count, batch))

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        """Deliver what is due by now, and return the router's choice."""
        while self._late and self._late[0][0] <= view.now_ns:
            self._router.observe(heappop(self._late)[2])
        return self._router.choose(request, view)

"""Workers of a live fleet that start, drain and stop by order (`POST /admin/scale`)."""

from __future__ import annotations

import asyncio
import math
import time
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.checks import read_as
from understudy.errors import ConfigError
from understudy.server.api.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.server.server import Server
    from understudy.server.settings import ServerSettings

POLLED_EVERY_S = 0.02
"""Time between two looks at workers that drain."""


class ScaleOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Number of workers of a pool that serve, at most as many as the fleet began with."""

    workers: int
    """Workers that are to serve, or to start; the others drain and stop."""
    pool: int | None = None
    """Number of the pool; needed where there are several."""
    startup_s: float = 0.0
    """Seconds of real time until a worker that starts serves requests."""

    @classmethod
    def read(cls, value: Any) -> ScaleOrder:
        """Read an order. ApiError names a field that is unknown or out of range."""
        try:
            order = read_as(cls, value)
        except ConfigError as error:
            raise ApiError(str(error), kind="Bad Request") from None
        if not (math.isfinite(order.startup_s) and order.startup_s >= 0):
            raise ApiError(
                f"startup_s must be a time from 0, got {order.startup_s:g}",
                param="startup_s",
                kind="Bad Request",
            )
        return order


class FleetScale:
    """The workers that serve, by pool. The highest ids leave first.

    A worker that leaves gets no new request, ends those that it has, and stops: it refuses requests, and its caches
    are empty. One that starts again serves after `startup_s`. One that still drains goes on serving, with its cache.
    """

    def __init__(self, servers: Sequence[Server], pools: Sequence[tuple[int, ServerSettings]]) -> None:
        self._servers = servers
        self._ranges: list[range] = []
        first = 0
        for count, _ in pools:
            self._ranges.append(range(first, first + count))
            first += count
        self._draining: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None

    def apply(self, order: ScaleOrder) -> dict[str, Any]:
        """Start or drain workers; return the numbers of those that changed. ApiError when it is invalid."""
        members = self._find_pool(order.pool)
        if not 0 <= order.workers <= len(members):
            raise ApiError(
                f"workers must be from 0 to {len(members)}, those that the fleet began with, got {order.workers}",
                param="workers",
                kind="Bad Request",
            )
        started, drained = [], []
        for place, index in enumerate(members):
            app = self._servers[index].app
            if place < order.workers and app.stopped:
                app.stopped = False
                app.ready_at_s = time.monotonic() + order.startup_s
                started.append(index)
            elif place < order.workers and index in self._draining:
                self._draining.discard(index)
                app.draining = False
                started.append(index)
            elif place >= order.workers and not app.stopped and index not in self._draining:
                app.draining = True
                self._draining.add(index)
                drained.append(index)
        self._stop_drained()
        return {"workers": order.workers, "started": started, "draining": drained}

    def count(self) -> list[dict[str, int]]:
        """Count the workers of each pool that serve or start, drain, and have stopped."""
        rows = []
        for members in self._ranges:
            stopped = sum(self._servers[index].app.stopped for index in members)
            draining = sum(index in self._draining for index in members)
            rows.append(
                {"workers": len(members) - stopped - draining, "draining": draining, "stopped": stopped}
            )
        return rows

    def _find_pool(self, number: int | None) -> range:
        if number is None:
            if len(self._ranges) > 1:
                raise ApiError(
                    f"pool is missing: this fleet has pools 0 … {len(self._ranges) - 1}",
                    param="pool",
                    kind="Bad Request",
                )
            number = 0
        if not 0 <= number < len(self._ranges):
            raise ApiError(
                f"there is no pool {number}; there are 0 … {len(self._ranges) - 1}",
                param="pool",
                kind="Bad Request",
            )
        return self._ranges[number]

    def _stop_drained(self) -> None:
        """Stop the workers that drain and have no request left; look again while there are others."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for index in tuple(self._draining):
            app = self._servers[index].app
            if app.endpoints.in_flight or app.worker.live():
                continue
            self._draining.discard(index)
            app.draining = False
            app.stopped = True
            app.worker.flush(lambda _: None)
        if self._draining:
            self._timer = asyncio.get_running_loop().call_later(POLLED_EVERY_S, self._stop_drained)

    def close(self) -> None:
        """Look at the workers no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

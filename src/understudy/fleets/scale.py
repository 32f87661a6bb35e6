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
    from collections.abc import Callable, Sequence

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

    def __init__(
        self,
        servers: Sequence[Server],
        pools: Sequence[tuple[int, ServerSettings]],
        *,
        stays_away: Callable[[int], bool] = lambda _: False,
        bring_back: Callable[[int], None] = lambda _: None,
        on_ready: Callable[[], None] = lambda: None,
        drain_limit_s: float | None = None,
    ) -> None:
        """`stays_away`: whether a worker has crashed for good; `bring_back`: lets it start again; `on_ready`: called
        when a worker that starts is ready.

        `drain_limit_s`: real time after which a worker that drains hands back its requests.
        """
        self._servers = servers
        self._stays_away = stays_away
        self._bring_back = bring_back
        self._on_ready = on_ready
        self._drain_limit_s = drain_limit_s
        self._limits: dict[int, asyncio.TimerHandle] = {}
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
        standing = [index for index in members if self._stands(index)]
        others = [index for index in members if not self._stands(index)]
        started = others[: max(order.workers - len(standing), 0)]
        drained = standing[order.workers :]
        for index in started:
            self._start(index, order.startup_s)
        for index in drained:
            self._drain(index)
        self._stop_drained()
        return {"workers": order.workers, "started": started, "draining": drained}

    def stop_at_once(self, index: int) -> None:
        """Stop a worker that has no request, before the fleet serves."""
        self._servers[index].app.stopped = True

    def num_workers(self, pool: int) -> int:
        """Return the most workers that a pool may have."""
        return len(self._ranges[pool])

    def pool_of(self, index: int) -> int:
        """Return the number of a worker's pool."""
        return next(number for number, members in enumerate(self._ranges) if index in members)

    def _stands(self, index: int) -> bool:
        """Return whether a worker serves, starts, or will be back after a crash."""
        gone = self._servers[index].app.stopped or self._stays_away(index)
        return not gone and index not in self._draining

    def _start(self, index: int, startup_s: float) -> None:
        app = self._servers[index].app
        if index in self._draining:
            self._draining.discard(index)
            self._end_limit(index)
            app.draining = False
            return
        if self._stays_away(index):
            self._bring_back(index)
        app.stopped = False
        app.ready_at_s = time.monotonic() + startup_s
        asyncio.get_running_loop().call_later(startup_s, self._on_ready)

    def _drain(self, index: int) -> None:
        server = self._servers[index]
        server.app.draining = True
        self._draining.add(index)
        if self._drain_limit_s is not None:
            self._limits[index] = asyncio.get_running_loop().call_later(
                self._drain_limit_s, server.worker.hand_back
            )

    def _end_limit(self, index: int) -> None:
        limit = self._limits.pop(index, None)
        if limit is not None:
            limit.cancel()

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
            self._end_limit(index)
            app.draining = False
            app.stopped = True
            app.worker.flush(lambda _: None)
        if self._draining:
            self._timer = asyncio.get_running_loop().call_later(POLLED_EVERY_S, self._stop_drained)

    def close(self) -> None:
        """Look at the workers no more."""
        for index in tuple(self._limits):
            self._end_limit(index)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

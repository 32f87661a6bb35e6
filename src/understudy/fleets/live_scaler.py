"""A scaler in the loop of a live fleet: reads the workers at its ticks and orders as in a replay."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from understudy._core import LifeState, measure_worker
from understudy.errors import UnderstudyError
from understudy.fleets.scale import ScaleOrder
from understudy.run.pools import WorkerPool
from understudy.run.scaler_driver import ScalerDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy._core import Engine, WorkerMetrics
    from understudy.fleets.scale import FleetScale
    from understudy.run.autoscale import Autoscale
    from understudy.server.live_request import LiveRequest
    from understudy.server.server import Server
    from understudy.server.settings import ServerSettings

log = logging.getLogger("understudy.fleet")


@dataclass
class LiveTraffic:
    """Requests since the last tick, and sums over those that completed."""

    since_ns: int = 0
    arrived: int = 0
    completed: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    hit_share: float = 0.0
    with_tokens: int = 0
    ttft_ns: float = 0.0
    with_gaps: int = 0
    itl_ns: float = 0.0

    def count(self, request: LiveRequest) -> None:
        """Add a request that has completed."""
        self.completed += 1
        self.prompt_tokens += request.prompt_tokens
        self.output_tokens += request.emitted
        if request.prompt_tokens:
            self.hit_share += request.cached_tokens / request.prompt_tokens
        if request.emitted < 1:
            return
        self.with_tokens += 1
        self.ttft_ns += request.first_token_ns - request.arrival_ns
        if request.emitted >= 2:
            self.with_gaps += 1
            self.itl_ns += (request.last_token_ns - request.first_token_ns) / (request.emitted - 1)


@dataclass
class LiveMetrics:
    """A live fleet at a tick."""

    now_ns: int
    workers: list[WorkerMetrics] = field(default_factory=list)
    traffic: LiveTraffic = field(default_factory=LiveTraffic)


class LiveScaler:
    """Calls a scaler at its ticks, in time of the fleet's clock, and passes its orders on."""

    def __init__(
        self,
        servers: Sequence[Server],
        pools: Sequence[tuple[int, ServerSettings]],
        autoscale: Autoscale,
        scale: FleetScale,
        stays_away: Callable[[int], bool],
    ) -> None:
        """Make the scaler. `pools`: with the workers that they begin with. ConfigError names a wrong setting."""
        self._servers = servers
        self._scale = scale
        self._stays_away = stays_away
        self._driver = ScalerDriver(autoscale, [_pool_of(count, settings) for count, settings in pools])
        self._start_ns = 0
        self._clock = servers[0].runtime.clock
        self._traffic = LiveTraffic()
        self._timer: asyncio.TimerHandle | None = None
        self.ticks = 0
        self.failure: str | None = None
        """Why the scaler is called no more; None while it works."""
        for server in servers:
            server.worker.on_end = self._on_end

    def start(self) -> None:
        """Call the scaler from now on. ConfigError if its first tick is not a time."""
        self._start_ns = self._clock.now_ns()
        self._call_at(self._driver.first_tick_ns)

    def close(self) -> None:
        """Call the scaler no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def on_arrival(self) -> None:
        """Count a request that has arrived at the front end."""
        self._traffic.arrived += 1

    def _on_end(self, _: int, request: LiveRequest) -> None:
        if request.ended == "finished":
            self._traffic.count(request)

    def _call_at(self, at_ns: int) -> None:
        wait_s = (self._start_ns + at_ns - self._clock.now_ns()) / self._clock.speed / 1e9
        self._timer = asyncio.get_running_loop().call_later(max(wait_s, 0.0), self._tick)

    def _tick(self) -> None:
        self._timer = None
        seen = self.measure()
        self._traffic = LiveTraffic(since_ns=seen.now_ns)
        self.ticks += 1
        try:
            targets, next_ns = self._driver.on_tick(seen)
            for pool, target in enumerate(targets):
                if target is not None:
                    startup_s = self._driver.start_ns[pool] / 1e9 / self._clock.speed
                    most = self._scale.num_workers(pool)
                    if target > most:
                        log.warning("autoscale: %d workers are wanted, and the fleet has %d", target, most)
                    self._scale.apply(ScaleOrder(workers=min(target, most), pool=pool, startup_s=startup_s))
        except UnderstudyError as error:
            self.failure = str(error)
            log.error("autoscale: the scaler failed and is called no more: %s", error)
            return
        if next_ns is not None:
            self._call_at(max(next_ns, seen.now_ns + 1))

    def measure(self) -> LiveMetrics:
        """Read the workers, and the traffic since the last tick."""
        seen = LiveMetrics(self._clock.now_ns() - self._start_ns, traffic=self._traffic)
        for index, server in enumerate(self._servers):
            state = self._state_of(index)
            if state is None:
                continue
            core = server.worker.cores[0]
            engine: Engine = core.simulated
            sent = [
                (request.engine_id, request.prompt_tokens + request.emitted, request.emitted > 0)
                for request in core.live.values()
            ]
            seen.workers.append(measure_worker(engine, index, self._scale.pool_of(index), state, sent))
        return seen

    def _state_of(self, index: int) -> LifeState | None:
        """Return a worker's state; None if it has stopped, or crashed for good."""
        app = self._servers[index].app
        if app.stopped or self._stays_away(index):
            return None
        if app.dead:
            return LifeState.RESTARTING
        if app.draining:
            return LifeState.DRAINING
        return LifeState.READY if app.takes_requests else LifeState.STARTING


def _pool_of(workers: int, settings: ServerSettings) -> WorkerPool:
    role = "both" if settings.handoff is None else settings.handoff.stage
    return WorkerPool(engine=settings.engine, workers=workers, role=cast("Any", role))

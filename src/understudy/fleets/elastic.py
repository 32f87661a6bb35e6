"""Changes of a live fleet by orders, a scaler and planned faults, and the requests that they hurt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.fleets.fault_checks import FaultChecks
from understudy.fleets.ledger import REASONS, Ledger
from understudy.fleets.live_scaler import LiveScaler
from understudy.fleets.lost_requests import LostRequests
from understudy.fleets.planned_faults import PlannedFaults
from understudy.fleets.scale import FleetScale

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.fleets.routing import FleetRouting
    from understudy.router.dispatch import Decision, LiveRouteRequest
    from understudy.run.autoscale import Autoscale
    from understudy.run.faults import FaultPlan
    from understudy.server.app import App
    from understudy.server.metrics import Registry
    from understudy.server.server import Server
    from understudy.server.settings import ServerSettings

CHECKED_AFTER_S = 0.2
"""Real time from a fault's begin or end to the check of its workers, in which late events arrive."""


class ElasticFleet:
    """The changes of a live fleet, and the requests of its front end."""

    def __init__(
        self,
        servers: Sequence[Server],
        routing: FleetRouting,
        pools: Sequence[tuple[int, ServerSettings]],
        *,
        starts: Sequence[int] | None = None,
        autoscale: Autoscale | None = None,
        faults: FaultPlan | None = None,
        on_sent: Callable[[LiveRouteRequest, Decision, int, str], None],
    ) -> None:
        """`pools`: with the most workers of each; `starts`: those that begin, of each (None: all).

        ConfigError names a fault or a setting of the scaler that the fleet cannot have.
        """
        self._servers = servers
        self._routing = routing
        speed = servers[0].runtime.clock.speed
        self.ledger = Ledger()
        self.faults: PlannedFaults | None = None
        self.lost: LostRequests | None = None
        self.scaler: LiveScaler | None = None
        if faults is not None:
            if any(server.worker.handoff is not None for server in servers):
                raise ConfigError(
                    "faults: planned faults and --on-loss do not work with prefill and decode workers yet"
                )
            self.faults = PlannedFaults(servers, routing, faults, on_changed=self._check_later)
            self.lost = LostRequests(servers, routing, faults, on_sent=on_sent, may_return=self._may_return)
        limit_s = None if faults is None or faults.drain_limit_s is None else faults.drain_limit_s / speed
        self.scale = FleetScale(
            servers,
            pools,
            stays_away=self._stays_away,
            bring_back=self._bring_back,
            drain_limit_s=limit_s,
            on_ready=routing.update_availability,
        )
        self.checks = FaultChecks(servers, routing, self.ledger, self._is_complete)
        self._check_timers: set[asyncio.TimerHandle] = set()
        if autoscale is not None:
            counts = [count for count, _ in pools] if starts is None else list(starts)
            begun = [(count, settings) for count, (_, settings) in zip(counts, pools, strict=True)]
            self.scaler = LiveScaler(servers, begun, autoscale, self.scale, self._stays_away)
            first = 0
            for count, (most, _) in zip(counts, pools, strict=True):
                for index in range(first + count, first + most):
                    self.scale.stop_at_once(index)
                first += most

    def add_metrics(self, registry: Registry) -> None:
        """Add the counts of requests, losses and checks to the front end's metrics."""
        for reason in REASONS:
            registry.gauge(
                "understudy:requests_ended",
                "Requests of the front end by how they ended.",
                lambda reason=reason: float(self.ledger.ended[reason]),  # type: ignore[misc]
                reason=reason,
            )
        registry.gauge(
            "understudy:requests_open",
            "Requests of the front end that have not ended.",
            lambda: float(self.ledger.open),
        )
        if self.lost is None:
            return
        lost = self.lost
        for outcome in ("failed", "retried", "migrated"):
            registry.gauge(
                "understudy:lost_requests",
                "Requests that lost their worker, by what became of them.",
                lambda outcome=outcome: float(lost.outcomes[outcome]),  # type: ignore[misc]
                outcome=outcome,
            )
        registry.gauge(
            "understudy:failed_checks",
            "Invariants that did not hold after a fault.",
            lambda: float(self.checks.num_mistakes),
        )

    def start(self) -> None:
        """Begin faults, and call the scaler, from now on."""
        if self.faults is not None:
            self.faults.start()
        if self.scaler is not None:
            self.scaler.start()

    def close(self) -> None:
        """Change nothing any more, and end requests without a worker."""
        if self.faults is not None:
            self.faults.close()
        if self.scaler is not None:
            self.scaler.close()
        for timer in self._check_timers:
            timer.cancel()
        self._check_timers.clear()
        self.scale.close()
        if self.lost is not None:
            self.lost.close()

    # ── Parts ──

    def _stays_away(self, worker: int) -> bool:
        return self.faults is not None and self.faults.stays_away(worker)

    def _bring_back(self, worker: int) -> None:
        assert self.faults is not None
        self.faults.bring_back(worker)

    def _is_complete(self, number: int) -> bool:
        return self.faults is None or self.faults.is_complete(number)

    def _may_return(self) -> bool:
        """Return whether a worker that takes no requests now will do so."""
        if self.scaler is not None and self.scaler.failure is None:
            return True
        if self.faults is not None and self.faults.may_return:
            return True
        return any(_will_serve(server.app) for server in self._servers)

    def _check_later(self, workers: list[int]) -> None:
        loop = asyncio.get_running_loop()

        self._routing.update_availability()

        def check() -> None:
            self._check_timers.discard(timer)
            self.checks.check(workers)

        timer = loop.call_later(CHECKED_AFTER_S, check)
        self._check_timers.add(timer)


def _will_serve(app: App) -> bool:
    """Return whether a worker serves, starts, or is dead for a given time."""
    if app.draining or app.stopped:
        return False
    if not app.dead:
        return True
    return any(row["kind"] == "kill" and row["left_s"] is not None for row in app.faults.active())

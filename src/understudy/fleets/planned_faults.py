"""The faults of a plan in a live fleet: begins and ends them at their times, as a replay does."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from understudy._core import Tier
from understudy.errors import ConfigError, WrongState
from understudy.fleets.event_faults import DisturbedEvents
from understudy.run.faults import EVENT_KINDS, fields_of
from understudy.server.faults import has_limited_link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.fleets.routing import FleetRouting
    from understudy.run.faults import Fault, FaultPlan
    from understudy.server.app import App
    from understudy.server.server import Server

REREADS = ("lose_events", "restart_router")
"""Faults after which the router reads all blocks anew."""


class PlannedFaults:
    """Begins and ends the faults of a plan. Their times are those of the fleet's clock, from its start."""

    def __init__(
        self,
        servers: Sequence[Server],
        routing: FleetRouting,
        plan: FaultPlan,
        *,
        on_changed: Callable[[list[int]], None],
    ) -> None:
        """Check the plan. `on_changed`: called with the workers of a fault that has begun or ended.

        ConfigError names a fault that this fleet cannot have.
        """
        self._servers = servers
        self._routing = routing
        self._plan = plan
        self._on_changed = on_changed
        self._faults = sorted(enumerate(plan.faults), key=lambda one: one[1].at_s)
        for number, fault in enumerate(plan.faults):
            _check(fault, f"faults: number {number}", servers, routing)
        self._active: dict[int, Fault] = {}
        self._returns: dict[int, asyncio.TimerHandle | None] = {}
        """By worker that has crashed: the timer of its return; None: it stays away."""
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._next = 0
        self._start_s = 0.0
        self._disturbed: DisturbedEvents | None = None
        if routing.dispatcher.wants_events and any(one.kind in EVENT_KINDS for one in plan.faults):
            native = [fault.native() for fault in plan.faults]
            clock = servers[0].runtime.clock
            self._disturbed = DisturbedEvents(native, plan.seed, clock, routing.dispatcher)
            routing.disturb(self._disturbed)

    def start(self) -> None:
        """Begin the faults from now on."""
        runtime = self._servers[0].runtime
        self._next = 0
        self._start_s = asyncio.get_running_loop().time()
        if self._disturbed is not None:
            self._disturbed.start(runtime.clock.now_ns())
        self._schedule_next()

    def close(self) -> None:
        """Begin and end no fault any more."""
        returns = [timer for timer in self._returns.values() if timer is not None]
        for timer in (*self._timers.values(), *returns):
            timer.cancel()
        self._timers.clear()
        if self._disturbed is not None:
            self._disturbed.close()

    @property
    def num_pending(self) -> int:
        """Faults that have neither ended nor, without an end, begun; crashed workers that will be back included."""
        returns = sum(timer is not None for timer in self._returns.values())
        return len(self._timers) + returns

    @property
    def may_return(self) -> bool:
        """Whether a worker that has crashed will be back."""
        return any(
            timer is not None and not self._servers[worker].app.stopped
            for worker, timer in self._returns.items()
        )

    def stays_away(self, worker: int) -> bool:
        """Return whether a worker has crashed and no fault brings it back."""
        return worker in self._returns and self._returns[worker] is None

    def bring_back(self, worker: int) -> None:
        """Let a worker that has crashed serve again, with empty caches."""
        timer = self._returns.pop(worker, None)
        if timer is not None:
            timer.cancel()
        server = self._servers[worker]
        server.worker.is_down = False
        server.app.dead = server.app.faults.is_dead
        planned = server.app.faults.planned
        for number in [number for number, row in planned.items() if row["kind"] == "kill"]:
            del planned[number]
        self._on_changed([worker])

    def is_complete(self, number: int) -> bool:
        """Return whether the router has received all events that a worker, by the router's number, has published."""
        return self._disturbed is None or self._disturbed.is_complete(number)

    # ── Times ──

    def _schedule_next(self) -> None:
        """Set the timer of the next fault: plans may have many."""
        if self._next == len(self._faults):
            return
        number, fault = self._faults[self._next]
        self._next += 1
        self._call_at(number, fault.at_s, partial(self._begin, number, fault))

    def _call_at(self, number: int, at_s: float, act: Callable[[], None]) -> None:
        speed = self._servers[0].runtime.clock.speed
        self._timers[number] = asyncio.get_running_loop().call_at(self._start_s + at_s / speed, act)

    def _begin(self, number: int, fault: Fault) -> None:
        del self._timers[number]
        hit = self._hit_by(fault)
        until_s = None
        if fault.duration_s is not None:
            end_s = fault.at_s + fault.duration_s
            until_s = self._start_s + end_s / self._servers[0].runtime.clock.speed
        if fault.kind == "kill":
            for worker in hit:
                self._crash(worker, fault)
        else:
            self._active[number] = fault
        if until_s is not None:
            self._call_at(number, fault.at_s + (fault.duration_s or 0.0), partial(self._end, number, fault))
        for worker in hit:
            app = self._servers[worker].app
            if not (fault.kind == "kill" and app.draining):
                app.faults.planned[number] = _describe(fault, until_s)
        if fault.kind == "restart_router" and self._disturbed is not None:
            for target in self._numbers(hit):
                self._disturbed.forget(target)
        self._apply(hit)
        self._schedule_next()
        self._on_changed(hit)

    def _end(self, number: int, fault: Fault) -> None:
        del self._timers[number]
        self._active.pop(number, None)
        hit = [
            index
            for index, server in enumerate(self._servers)
            if server.app.faults.planned.pop(number, None) is not None
        ]
        if fault.kind in REREADS and self._disturbed is not None:
            for target in self._numbers(hit):
                self._disturbed.reread(target)
        self._apply(hit)
        self._on_changed(hit)

    # ── Workers ──

    def _hit_by(self, fault: Fault) -> list[int]:
        """List the workers that a fault finds: those that have neither stopped nor crashed, unless they will return."""
        named = range(len(self._servers)) if fault.worker is None else (fault.worker,)
        return [
            index for index in named if not self._servers[index].app.stopped and not self.stays_away(index)
        ]

    def _numbers(self, workers: Sequence[int]) -> list[int]:
        return [number for worker in workers for number in self._routing.numbers_of(worker)]

    def _crash(self, worker: int, fault: Fault) -> None:
        app = self._servers[worker].app
        earlier = self._returns.pop(worker, None)
        if earlier is not None:
            earlier.cancel()
        if not app.draining:  # one that drains stops instead of coming back
            app.worker.is_down = True
            app.dead = True
            self._returns[worker] = None
            if fault.duration_s is not None:
                speed = app.worker.driver.clock.speed
                self._returns[worker] = asyncio.get_running_loop().call_later(
                    fault.duration_s / speed, self.bring_back, worker
                )
        app.worker.kill()

    def _apply(self, workers: Sequence[int]) -> None:
        """Set the engines of workers to the worst of the faults that last."""
        for index in workers:
            worker = self._servers[index].worker
            own = [fault for fault in self._active.values() if fault.worker in (None, index)]
            slowdown = max((fault.factor for fault in own if fault.kind == "slow"), default=1.0)
            failures = {
                Tier[tier.upper()]: max(
                    (one.rate for one in own if one.kind == "fail_loads" and one.tier == tier), default=0.0
                )
                for tier in {one.tier for one in self._plan.faults if one.kind == "fail_loads"}
            }
            for core in worker.cores:

                def disturb(
                    _: int, core: Any = core, slowdown: float = slowdown, failures: Any = failures
                ) -> None:
                    core.set_slowdown(slowdown)
                    for tier, rate in failures.items():
                        core.set_load_failures(tier, rate)

                worker.driver.enqueue(core, disturb)
            for tier in {one.tier for one in self._plan.faults if one.kind == "slow_link"}:
                links = [one.factor for one in own if one.kind == "slow_link" and one.tier == tier]
                worker.slow_links(tier, max(links, default=1.0))


def _describe(fault: Fault, until_s: float | None) -> dict[str, Any]:
    """Describe a planned fault as `Faults.active` does; `until_s`: by the event loop's clock."""
    until = None if until_s is None else time.time() + until_s - asyncio.get_running_loop().time()
    return {
        "kind": fault.kind,
        **{name: getattr(fault, name) for name in fields_of(fault.kind)},
        "planned": True,
        "until": until,
    }


def _check(fault: Fault, what: str, servers: Sequence[Server], routing: FleetRouting) -> None:
    if fault.worker is not None and fault.worker >= len(servers):
        raise ConfigError(f"{what}: there is no worker {fault.worker}; there are 0 to {len(servers) - 1}")
    if fault.kind in EVENT_KINDS and not routing.dispatcher.wants_events:
        raise ConfigError(
            f"{what}: the router receives no events; choose --routing kv, or leave the fault out"
        )
    shares = fault.kind == "slow_link" and fault.tier != "g2"
    if shares and fault.worker is not None:
        raise ConfigError(f"{what}: workers share this tier; leave the worker out")
    for index in range(len(servers)) if fault.worker is None else (fault.worker,):
        _check_worker(fault, what, servers[index].app)


def _check_worker(fault: Fault, what: str, app: App) -> None:
    worker = app.worker
    if len(worker.cores) > 1:
        raise ConfigError(
            f"{what}: faults do not work with data-parallel ranks yet; leave --data-parallel-size out"
        )
    if worker.handoff is not None:
        raise ConfigError(f"{what}: planned faults do not work with prefill and decode workers yet")
    if fault.kind == "slow_link" and not has_limited_link(app.settings, fault.tier):
        raise ConfigError(
            f"{what}: worker {worker.index} has no {fault.tier} tier behind a link with a limit"
        )
    try:
        if fault.kind == "slow":
            worker.cores[0].set_slowdown(1.0)
        elif fault.kind == "fail_loads":
            worker.cores[0].set_load_failures(Tier[fault.tier.upper()], 0.0)
    except WrongState as error:
        raise ConfigError(f"{what}: {error}") from None

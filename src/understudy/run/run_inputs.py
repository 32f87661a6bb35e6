"""`RunInputs`: a plan in the form that the core takes, and its result in the order of the workload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from understudy._core import Elastic, FleetSettings, NativeRouter, PlayLimits
from understudy.engines.group_layouts import group_labels
from understudy.errors import ConfigError
from understudy.router.choice import NotedRouter
from understudy.router.delayed import DelayedEvents, LateRouter
from understudy.router.kv import KvRouting
from understudy.run.deep_check import copy_inputs
from understudy.run.faults import FaultPlan
from understudy.run.fleet_plan import FleetPlan
from understudy.run.kv_log import KvLog
from understudy.run.ranks import RankFront, count_ranks, has_front
from understudy.run.scaler_driver import ScalerDriver
from understudy.run.session_kv import SessionDriver
from understudy.run.timeline import Timeline
from understudy.run.times import add_front_end_time, front_end_ns
from understudy.workload import ClosedLoop, Lockstep, OpenLoop, Plays
from understudy.workload.arrivals import LOCKSTEP_NS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from understudy._core import Checkpoints, FleetResult, StepTable
    from understudy.engines.timing import TimingModel
    from understudy.router import Router
    from understudy.run.routing_choice import Routing, RoutingChoice
    from understudy.run.run_plan import RunPlan
    from understudy.workload import Workload


@dataclass(frozen=True, kw_only=True)
class RunInputs:
    """Requests in the order of their arrival, and the fleet that serves them."""

    plan: RunPlan
    workload: Workload
    """Rows by arrival at the load's rate; later turns wait for the front end as well."""
    order: npt.NDArray[np.int64] | None
    """Row of the given workload for each of these; None: unchanged."""
    fleet: FleetPlan
    routing: RoutingChoice
    delivery: DelayedEvents | None
    """How late its events are, for a user-defined router."""
    timing: TimingModel | None
    outside_ns: int
    """Time between client and engine: a client sees each end later, and sends the next turn later."""

    @classmethod
    def of(cls, plan: RunPlan) -> RunInputs:
        """Order the requests and plan the fleet. ConfigError where it cannot serve them, or needs too much memory."""
        workload, order = _sort_by_arrival(plan)
        fleet = FleetPlan(plan.fleet, workload, count_ranks(plan.fleet), meet=plan.workers_meet)
        if plan.threads > 1 and plan.timing is not None and fleet.workers > 1:  # workers share it
            raise ConfigError(
                f"threads > 1 needs independent workers, but all share timing {type(plan.timing).__qualname__}, whose "
                "order of calls is not fixed with threads; leave threads out"
            )
        outside_ns = front_end_ns(fleet.pools, plan.timing)
        if outside_ns:
            graph = workload.graph
            if graph is not None:
                workload = replace(workload, graph=graph.delayed(outside_ns))
            else:
                workload = replace(workload, delay_ns=workload.delay_ns + outside_ns * (workload.turn > 0))
        delivery = plan.routing if isinstance(plan.routing, DelayedEvents) else None
        routing = plan.routing if delivery is None else delivery.router
        return cls(
            plan=plan,
            workload=workload,
            order=order,
            fleet=fleet,
            routing=KvRouting() if routing == "kv" else routing,
            delivery=delivery,
            timing=plan.timing,
            outside_ns=outside_ns,
        )

    def copy(self) -> RunInputs:
        """Copy user-defined objects, before a run changes them. ConfigError where one cannot be copied."""
        fleet, routing, timing = copy_inputs(self.fleet, self.routing, self.timing)
        return replace(self, fleet=fleet, routing=routing, timing=timing)

    def build_router(self) -> Routing | Router | NativeRouter:
        """Build the router of a run; the front end of an engine's ranks where no router chooses among them."""
        if isinstance(self.routing, KvRouting):
            return self.routing.build(self.plan.seed, keep_candidates=self.plan.keep_candidates)
        if self.fleet.ranks > 1 and has_front(self.fleet.deployments, self.routing):
            return RankFront(self.fleet.engine.profile)
        if isinstance(self.routing, str | NativeRouter) or not hasattr(self.routing, "choose"):
            return cast("Routing | Router | NativeRouter", self.routing)  # the core refuses what is no router
        own: Router | LateRouter = cast("Router", self.routing)
        if self.delivery is not None:
            own = LateRouter(cast("Router", own), self.delivery, self.plan.seed)
        return cast("Router", NotedRouter(own))

    def build_settings(
        self,
        router: Routing | Router | NativeRouter,
        *,
        fast_forward: bool,
        check: bool = False,
        checkpoints: Checkpoints | None = None,
        steps: StepTable | None = None,
        scaler: ScalerDriver | None = None,
    ) -> FleetSettings:
        """Build the core's settings for one run."""
        plan, fleet, load, parted = self.plan, self.fleet, self.plan.pace, self.plan.disaggregation
        closed = load if isinstance(load, ClosedLoop) else None
        faults, lost = (FaultPlan() if plan.faults is None else plan.faults).native()
        lanes = load.lanes if isinstance(load, Plays) else 0
        return FleetSettings(
            pools=fleet.native(
                self.timing,
                events=plan.events or plan.keep_misses or plan.record_steps is not None,
                kv_trace=plan.kv_trace,
                seed=plan.seed,
                disaggregation=parted,
            ),
            # Made for each run: it has the routers of decode workers.
            disaggregation=None if parted is None else parted.native(fleet.engine.block_size, plan.seed),
            routing=router,
            seed=plan.seed,
            concurrency=lanes if closed is None else closed.concurrency,
            turnaround_ns=(self.outside_ns if lanes else 0)
            if closed is None
            else round(closed.turnaround_ms * 1e6) + self.outside_ns,
            play_limits=_limit_plays(load, plan.preparing_plays) if isinstance(load, Plays) else None,
            lockstep_ns=LOCKSTEP_NS if isinstance(load, Lockstep) else 0,
            threads=plan.threads,
            ranks=(fleet.ranks if fleet.ranks > 1 else fleet.workers) if plan.ranks else 1,
            fast_forward=fast_forward,
            check=check,
            checkpoints=checkpoints,
            steps=steps,
            elastic=None
            if scaler is None
            else Elastic(start_ns=scaler.start_ns, first_tick_ns=scaler.first_tick_ns),
            faults=faults,
            lost=lost,
            fault_seed=0 if plan.faults is None else plan.faults.seed,
        )

    def build_scaler(self) -> ScalerDriver | None:
        """Build the scaler of a run, if the plan has one."""
        if self.plan.autoscale is None:
            return None
        return ScalerDriver(self.plan.autoscale, self.fleet.pools, self.timing)

    def build_session_driver(self) -> SessionDriver | None:
        """Build the policy of sleeping sessions of a run, if the plan has one."""
        return None if self.plan.session_kv is None else SessionDriver(self.plan.session_kv)

    def list_names(self) -> list[str]:
        """Return request names for error messages (empty: rows are used). Under priorities, names break ties."""
        if self.fleet.engine.orders_by_name:
            return self.workload.request_ids or []
        return [] if self.order is None else list(map(str, self.order.tolist()))

    def read(self, result: FleetResult, scaler: ScalerDriver | None = None) -> tuple[Timeline, KvLog | None]:
        """Return the columns by row of the given workload, and the KV log if the plan keeps one."""
        plan, engine = self.plan, self.fleet.engine
        timeline = Timeline.from_result(
            result,
            plan.workload,
            self.order,
            worker_blocks=self.fleet.worker_blocks(result.worker_pool.tolist()),
            block_size=engine.block_size,
            decisions=() if scaler is None else scaler.decisions,
        )
        timeline = add_front_end_time(timeline, self.outside_ns)
        has_events = plan.events or plan.keep_misses
        if not has_events and not plan.kv_trace:
            return timeline, None
        return timeline, KvLog(
            result,
            engine.block_size,
            timeline.worker_blocks,
            events=has_events,
            kv_trace=plan.kv_trace,
            groups=group_labels(engine),
        )


def _limit_plays(load: Plays, preparing_plays: int) -> PlayLimits:
    play_idle_s, fleet_idle_s = load.idle_caps_s
    return PlayLimits(
        preparing_plays=preparing_plays,
        duration_ns=round(load.duration_s * 1e9),
        grace_ns=round(load.grace_s * 1e9),
        play_idle_ns=round(play_idle_s * 1e9),
        fleet_idle_ns=round(fleet_idle_s * 1e9),
    )


def _sort_by_arrival(plan: RunPlan) -> tuple[Workload, npt.NDArray[np.int64] | None]:
    """Return the rows in order of arrival at the load's rate, and that order (None: unchanged)."""
    workload, load = plan.workload, plan.pace
    if isinstance(load, Plays) and load.clock == "client" and workload.graph is not None:
        workload = replace(workload, graph=workload.graph.without_floors())
    if isinstance(load, Plays) and load.lanes:
        return workload.scale_arrival_rate(load.arrival_rate_scale), None
    if isinstance(load, ClosedLoop):
        return workload, None
    order = workload.arrival_order()
    workload = workload if order is None else workload.take(order)
    if isinstance(load, OpenLoop | Plays):
        workload = workload.normalised().scale_arrival_rate(load.arrival_rate_scale)
    return workload, order

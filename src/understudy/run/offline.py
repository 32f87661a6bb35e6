"""Offline replay: run a workload on simulated workers with a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from understudy._core import Checkpoints, RecordedRouter, StepTable, run_fleet
from understudy.engines.group_layouts import group_labels
from understudy.errors import ConfigError
from understudy.router.choice import NotedRouter
from understudy.router.choices import Choices
from understudy.router.kv import Decisions, KvRouter, KvRouting
from understudy.run.admissions import LastTokens, require_possible_hits
from understudy.run.cut_outputs import note_cut_outputs
from understudy.run.deep_check import describe_comparison, require_equal
from understudy.run.digest import digests
from understudy.run.facts import RunFacts  # noqa: TC001  (msgspec reads the annotations)
from understudy.run.group_facts import summarise_groups
from understudy.run.kv_log import KvLog  # noqa: TC001
from understudy.run.routed import summarise_decisions
from understudy.run.run_inputs import RunInputs
from understudy.run.session_kv import describe_totals
from understudy.run.step_columns import StepColumns
from understudy.run.timeline import Timeline  # noqa: TC001
from understudy.run.times import describe_times
from understudy.workload import Lockstep, Plays
from understudy.workload.files import create_trace

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike

    from understudy._core import FleetResult, FleetSettings, VllmEngine
    from understudy.run.run_plan import RunPlan
    from understudy.run.scaler_driver import ScalerDriver


class OfflineRun(msgspec.Struct, frozen=True):
    """Result of a run: its columns, the facts to reproduce it (with its digest), and its KV log if kept."""

    timeline: Timeline
    facts: RunFacts
    kv: KvLog | None = None
    decisions: Decisions | None = None
    """Decisions of a KV-aware router; rows are those of the given workload."""
    notes: tuple[str, ...] = ()
    """How many outputs the engine cut, and results of `check="deep"`."""
    steps: StepColumns | None = None
    """Every step and decision, if `keep_steps` was set."""
    play_begin_ns: int = -1
    """When the lanes of plays began, after their preparation; −1 without lanes."""
    idle_lanes: int = 0
    """Lanes for which no play was left before the end of the duration."""
    choices: Choices | None = None
    """Choices of a user-defined router, or of any without costs if `keep_candidates` was set."""


def run_offline(plan: RunPlan) -> OfflineRun:
    """Play a workload to its end.

    Requests that can never fit are rejected and reported. Errors: WrongState names the requests of a run without
    progress; InvariantViolated where a check fails; ConfigError where the fleet cannot serve the workload.
    """
    if isinstance(plan.pace, Plays) and plan.pace.warm_up and not plan.preparing_plays:
        raise ConfigError(
            "warm_up: use understudy.replay, or run.profile_run.run_profile, which makes the warm-up"
        )
    inputs = RunInputs.of(plan)
    stepped = inputs.copy() if plan.is_deep else None
    router = inputs.build_router()
    noted = router if isinstance(router, NotedRouter) else None
    if plan.records_choices and not isinstance(router, KvRouter):
        router = RecordedRouter(router, seed=plan.seed, keep_candidates=plan.keep_candidates)
    checkpoints = Checkpoints() if plan.is_deep else None
    table = StepTable() if plan.keep_steps else None
    scaler = inputs.build_scaler()
    settings = inputs.build_settings(
        router,
        scaler=scaler,
        fast_forward=plan.fast_forward,
        check=bool(plan.check),
        checkpoints=checkpoints,
        steps=table,
    )
    result = _play(inputs, settings, scaler, may_route_by_events=not isinstance(router, str))
    timeline, kv = inputs.read(result, scaler)
    facts = inputs.fleet.describe()
    # A request that starts anew may hit what it has computed itself.
    if plan.check and timeline.losses is None:
        require_possible_hits(
            plan.workload, timeline, shares_tiers=inputs.fleet.shares_tiers, last=LastTokens.of(facts)
        )
    decisions = choices = None
    if isinstance(router, RecordedRouter):
        choices = Choices.take(router, inputs.order, with_candidates=plan.keep_candidates, noted=noted)
    if isinstance(router, KvRouter):
        decisions = router.decisions
        if inputs.order is not None:
            decisions = msgspec.structs.replace(decisions, rows=inputs.order[decisions.rows])
    facts = _add_facts(facts, inputs, result, timeline, kv, choices if decisions is None else decisions)
    notes = note_cut_outputs(timeline)
    if stepped is not None and checkpoints is not None:
        if checkpoints.recorded:
            _compare_with_steps(stepped, checkpoints, timeline, kv)
        notes = (*notes, describe_comparison(checkpoints, inputs.fleet.pools, plan.timing, ranks=plan.ranks))
    steps = None if table is None else StepColumns.take(table, inputs.order)
    return OfflineRun(
        timeline,
        facts,
        kv,
        decisions,
        notes,
        steps,
        play_begin_ns=result.play_begin_ns,
        idle_lanes=result.idle_lanes,
        choices=choices,
    )


def _play(
    inputs: RunInputs, settings: FleetSettings, scaler: ScalerDriver | None, *, may_route_by_events: bool
) -> FleetResult:
    """Run the core; write or report steps if the plan says so."""
    plan = inputs.plan
    if plan.record_steps is not None:
        return _record(inputs, settings, plan.record_steps, keep_events=plan.events or may_route_by_events)
    on_step = None if plan.on_step_end is None else _report_ends(plan.on_step_end)
    sessions = inputs.build_session_driver()
    return run_fleet(
        inputs.workload,
        settings,
        progress=plan.progress,
        names=inputs.list_names(),
        on_step=on_step,
        on_tick=None if scaler is None else scaler.on_tick,
        on_sleep=None if sessions is None else sessions.on_sleep,
    )


def _record(
    inputs: RunInputs, settings: FleetSettings, path: str | PathLike[str], *, keep_events: bool
) -> FleetResult:
    """Run the core and write each of its steps."""
    from understudy.run.step_file import StepFile

    workload, fleet = inputs.workload, inputs.fleet
    with create_trace(path) as file:
        rows = range(len(workload)) if inputs.order is None else inputs.order.tolist()
        names = workload.request_ids or list(map(str, rows))
        timed = not isinstance(inputs.plan.load, Lockstep)
        steps = StepFile(
            file, workload, names, fleet.engine, workers=fleet.workers, timed=timed, keep_events=keep_events
        )
        sessions = inputs.build_session_driver()
        result = run_fleet(
            workload,
            settings,
            progress=inputs.plan.progress,
            names=names,
            on_step=steps.on_step,
            on_sleep=None if sessions is None else sessions.on_sleep,
        )
        steps.finish()
    return result


def _report_ends(report: Callable[[int, int], None]) -> Callable[[int, VllmEngine, bool], None]:
    def on_step(worker: int, engine: VllmEngine, ended: bool) -> None:
        if ended:
            report(worker, engine.now_ns)

    return on_step


def _add_facts(
    facts: RunFacts,
    inputs: RunInputs,
    result: FleetResult,
    timeline: Timeline,
    kv: KvLog | None,
    routed: Choices | Decisions | None,
) -> RunFacts:
    """Add what was run, and its digests, to the facts of the fleet."""
    plan, fleet, routing = inputs.plan, inputs.fleet, inputs.routing
    parted, timing = plan.disaggregation, plan.timing
    return replace(
        facts,
        routing=routing if isinstance(routing, str | KvRouting) else type(routing).__qualname__,
        event_delivery={} if inputs.delivery is None else inputs.delivery.settings,
        seed=plan.seed,
        disaggregation={} if parted is None else parted.describe(),
        autoscale={} if plan.autoscale is None else plan.autoscale.describe(),
        session_kv={}
        if plan.session_kv is None
        else {**plan.session_kv.describe(), "done": describe_totals(result.prefixes)},
        faults={} if plan.faults is None else plan.faults.describe(),
        load=plan.pace,
        timing=None if timing is None else type(timing).__qualname__,
        times=describe_times(fleet.pools, timing, result),
        kv_groups=summarise_groups(result.groups, group_labels(fleet.engine)),
        router={} if routed is None else summarise_decisions(routed, timeline, fleet.engine.block_size),
        **digests(timeline, kv if plan.events else None),
    )


def _compare_with_steps(
    inputs: RunInputs, checkpoints: Checkpoints, timeline: Timeline, kv: KvLog | None
) -> None:
    """Run the inputs step by step; raise InvariantViolated where the run that fast-forwarded differs."""
    scaler = inputs.build_scaler()
    settings = inputs.build_settings(
        inputs.build_router(), fast_forward=False, checkpoints=checkpoints, scaler=scaler
    )
    sessions = inputs.build_session_driver()
    result = run_fleet(
        inputs.workload,
        settings,
        names=inputs.list_names(),
        on_tick=None if scaler is None else scaler.on_tick,
        on_sleep=None if sessions is None else sessions.on_sleep,
    )
    stepped, its_kv = inputs.read(result, scaler)
    require_equal(timeline, stepped, (kv, its_kv) if inputs.plan.events else (None, None))

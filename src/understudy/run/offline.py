"""Offline replay: run a workload on simulated workers with a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from understudy._core import (
    Checkpoints,
    FleetSettings,
    NativeRouter,
    RecordedRouter,
    StepTable,
    run_fleet,
)
from understudy.checks import whole_number
from understudy.engines.group_layouts import group_labels
from understudy.engines.kinds.registry import DEFAULT_ENGINE
from understudy.errors import ConfigError
from understudy.router.choices import Choices
from understudy.router.kv import Decisions, KvRouter, KvRouting
from understudy.run.admissions import LastTokens, require_possible_hits
from understudy.run.cut_outputs import note_cut_outputs
from understudy.run.deep_check import copy_inputs, describe_comparison, require_equal
from understudy.run.digest import digests
from understudy.run.facts import RunFacts  # noqa: TC001  (msgspec reads the annotation)
from understudy.run.fleet_plan import FleetPlan
from understudy.run.group_facts import summarise_groups
from understudy.run.kv_log import KvLog
from understudy.run.pools import WorkerPool, make_pools
from understudy.run.ranks import RankFront, count_ranks, has_front
from understudy.run.routed import summarise_decisions
from understudy.run.routing_choice import Routing
from understudy.run.step_columns import StepColumns
from understudy.run.timeline import Timeline
from understudy.run.times import add_front_end_time, describe_times, front_end_ns
from understudy.workload import ClosedLoop, Lockstep, OpenLoop, Workload
from understudy.workload.arrivals import LOCKSTEP_NS
from understudy.workload.files import create_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    import numpy as np
    import numpy.typing as npt

    from understudy._core import Disaggregation as CoreDisaggregation
    from understudy._core import FleetResult, VllmEngine
    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.timing import TimingModel
    from understudy.router import Router
    from understudy.run.disaggregation import Disaggregation
    from understudy.run.routing_choice import RoutingChoice
    from understudy.tiers.settings import TiersConfig


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
    choices: Choices | None = None
    """Choices of a user-defined router, or of any without costs if `keep_candidates` was set."""


def run_offline(
    workload: Workload,
    engine: EngineConfig | None = None,
    *,
    workers: int = 1,
    pools: Sequence[WorkerPool] = (),
    routing: RoutingChoice = "round_robin",
    seed: int = 0,
    load: OpenLoop | ClosedLoop | Lockstep | None = None,
    timing: TimingModel | None = None,
    tiers: TiersConfig | None = None,
    threads: int = 1,
    fast_forward: bool = True,
    check: bool | Literal["deep"] = False,
    events: bool = False,
    kv_trace: bool = False,
    progress: Callable[[int], None] | None = None,
    record_steps: str | PathLike[str] | None = None,
    on_step_end: Callable[[int, int], None] | None = None,
    ranks: bool = False,
    keep_steps: bool = False,
    disaggregation: Disaggregation | None = None,
    keep_candidates: bool = False,
) -> OfflineRun:
    """Play a workload to its end.

    `pools` describes a fleet whose workers are not all alike, in place of `engine`, `workers` and `tiers`. `routing` is
    a name, settings of the KV-aware router (`KvRouting`), or a `Router` of your own.
    `load` defaults to an open loop at the workload's own pace; `timing` is a model of your own, in place of the
    engine's. `tiers` lie below the device; unless given, those that came with the engine's settings. `threads` > 1
    needs workers that are independent: open loop, single-turn requests, round-robin or random routing, neither g3 nor
    g4, no aborts, no policy or timing model of yours. `check` verifies the state after every step and at both ends of
    every fast-forward (InvariantViolated), without changing the run; "deep" also replays the run step by step, compares
    the state at the end of every fast-forward and all columns, and adds a line to `notes`. `events` and `kv_trace` keep
    the run's KV events, and its allocations and evictions; `fast_forward` off runs every decode step, with the
    same result. `record_steps` names a file for every step of every worker, in the form of a recorded schedule (gzipped
    when its name ends in .gz): it tells which blocks go next, so that it needs a built-in eviction policy on the
    device; `on_step_end` receives the worker and the time (ns) at the end of every step. Both see every step by itself,
    and so does `keep_steps`, which keeps the batches and decisions of all steps in `steps`. `keep_candidates`
    keeps, for each choice of a router other than kv, load and cached blocks of every worker that could be chosen.
    `ranks` says that data-parallel ranks of a model with experts step together, as long as the slowest: the ranks of
    each worker (the engine's `data_parallel_size`), or all workers where each is one rank. `disaggregation` divides
    requests between pools with the roles prefill and decode; `routing` then chooses prefill workers.
    Requests that can never fit are rejected and reported; a run without progress raises WrongState and says who is
    stuck.
    """
    load = OpenLoop() if load is None else load
    _check(
        load,
        routing,
        timing,
        progress,
        fast_forward=fast_forward,
        ranks=ranks,
        keep_steps=keep_steps,
    )
    if keep_steps and isinstance(load, Lockstep):
        raise ConfigError("keep_steps: steps of a lockstep run have no times; leave it out")
    is_deep = _is_deep(
        check,
        steps_only=not fast_forward or record_steps is not None or on_step_end is not None or keep_steps,
    )
    seed = whole_number("seed", seed, 0, 2**64 - 1)
    threads = whole_number("threads", threads, 1, 4096)
    if disaggregation is not None and not pools:
        pools, engine, tiers = disaggregation.make_pools(engine or DEFAULT_ENGINE, tiers), None, None
    pools = make_pools(pools, engine, workers, tiers)
    _check_roles(pools, disaggregation)
    is_users = not isinstance(routing, str | KvRouting | NativeRouter)
    records_choices = is_users or keep_candidates
    if disaggregation is not None and record_steps is not None:
        raise ConfigError("record_steps does not work with prefill and decode workers yet; leave it out")
    if record_steps is not None:
        for pool in pools:
            pool.engine.check_recordable()
    given = workload
    workload, order = _sort_by_arrival(workload, load)
    is_observed = record_steps is not None or on_step_end is not None or ranks or keep_steps
    are_independent = (
        isinstance(load, OpenLoop)
        and routing in ("round_robin", "random")
        and not workload.turn.any()
        and not workload.has_aborts
        and disaggregation is None
    )
    fleet = FleetPlan(pools, workload, count_ranks(pools), meet=is_observed or not are_independent)
    if threads > 1 and timing is not None and fleet.workers > 1:  # workers share it
        raise ConfigError(
            f"threads > 1 needs independent workers, but all share timing {type(timing).__qualname__}, whose order of "
            "calls is not fixed with threads; leave threads out"
        )
    if routing == "kv":
        routing = KvRouting()
    copies = copy_inputs(fleet, routing, timing) if is_deep else None
    router = _build_router(routing, fleet, seed)
    if records_choices and not isinstance(router, KvRouter):
        router = RecordedRouter(router, seed=seed, keep_candidates=keep_candidates)
    outside_ns = front_end_ns(fleet.pools, timing)
    if outside_ns:  # the client sees each end later, and so sends the next turn later
        workload = replace(workload, delay_ns=workload.delay_ns + outside_ns * (workload.turn > 0))
    checkpoints = Checkpoints() if is_deep else None
    table = StepTable() if keep_steps else None
    build_settings = partial(
        FleetSettings,
        seed=seed,
        concurrency=load.concurrency if isinstance(load, ClosedLoop) else 0,
        threads=threads,
        lockstep_ns=LOCKSTEP_NS if isinstance(load, Lockstep) else 0,
        ranks=(fleet.ranks if fleet.ranks > 1 else fleet.workers) if ranks else 1,
        turnaround_ns=round(load.turnaround_ms * 1e6) + outside_ns if isinstance(load, ClosedLoop) else 0,
        checkpoints=checkpoints,
    )

    def divide() -> CoreDisaggregation | None:  # routers of decode workers are made anew for each run
        return None if disaggregation is None else disaggregation.native(fleet.engine.block_size, seed)

    settings = build_settings(
        pools=fleet.native(
            timing,
            events=events or record_steps is not None,
            kv_trace=kv_trace,
            seed=seed,
            disaggregation=disaggregation,
        ),
        disaggregation=divide(),
        routing=router,
        fast_forward=fast_forward,
        check=bool(check),
        steps=table,
    )
    run = partial(run_fleet, workload, settings, progress=progress)
    names = _list_request_names(workload, order, fleet.engine)
    if record_steps is None:
        result = run(names=names, on_step=None if on_step_end is None else _ends(on_step_end))
    else:
        timed = not isinstance(load, Lockstep)
        keep_events = events or not isinstance(router, str)  # a router object may receive events
        result = _run_recorded(
            run, record_steps, workload, order, fleet, timed=timed, keep_events=keep_events
        )

    def read_result(result: FleetResult) -> tuple[Timeline, KvLog | None]:
        timeline = Timeline.from_result(
            result, given, order, worker_blocks=fleet.worker_blocks, block_size=fleet.engine.block_size
        )
        timeline = add_front_end_time(timeline, outside_ns)
        if not events and not kv_trace:
            return timeline, None
        blocks = timeline.worker_blocks
        return timeline, KvLog(
            result,
            fleet.engine.block_size,
            blocks,
            events=events,
            kv_trace=kv_trace,
            groups=group_labels(fleet.engine),
        )

    timeline, kv = read_result(result)
    if check and not result.groups:
        require_possible_hits(
            given, timeline, shares_tiers=fleet.shares_tiers, last=LastTokens.of(fleet.describe())
        )
    facts = replace(
        fleet.describe(),
        routing=routing if isinstance(routing, str | KvRouting) else type(routing).__qualname__,
        seed=seed,
        disaggregation={} if disaggregation is None else disaggregation.describe(),
        load=load,
        timing=None if timing is None else type(timing).__qualname__,
        times=describe_times(fleet.pools, timing, result),
        kv_groups=summarise_groups(result.groups, group_labels(fleet.engine)),
        **digests(timeline, kv if events else None),
    )
    decisions = choices = None
    if isinstance(router, RecordedRouter):
        choices = Choices.take(router, order, with_candidates=keep_candidates)
        facts = replace(facts, router=summarise_decisions(choices, timeline, fleet.engine.block_size))
    if isinstance(router, KvRouter):
        decisions = router.decisions
        if order is not None:
            decisions = msgspec.structs.replace(decisions, rows=order[decisions.rows])
        facts = replace(facts, router=summarise_decisions(decisions, timeline, fleet.engine.block_size))
    notes = note_cut_outputs(timeline)
    if checkpoints is not None and copies is not None:
        if checkpoints.recorded:
            copied, routing, its_timing = copies
            settings = build_settings(
                pools=copied.native(
                    its_timing, events=events, kv_trace=kv_trace, seed=seed, disaggregation=disaggregation
                ),
                disaggregation=divide(),
                routing=_build_router(routing, copied, seed),
                fast_forward=False,
            )
            replayed, its_kv = read_result(run_fleet(workload, settings, names=names))
            require_equal(timeline, replayed, (kv, its_kv) if events else (None, None))
        notes = (*notes, describe_comparison(checkpoints, fleet.pools, timing, ranks=ranks))
    steps = None if table is None else StepColumns.take(table, order)
    return OfflineRun(timeline, facts, kv, decisions, notes, steps, choices)


def _check_roles(pools: Sequence[WorkerPool], disaggregation: Disaggregation | None) -> None:
    """Raise ConfigError where roles and `disaggregation` do not agree."""
    if disaggregation is not None:
        return disaggregation.check_pools(pools)
    for pool in pools:
        if pool.role != "both":
            raise ConfigError(
                f"disaggregation: pool {pool.name} has the role {pool.role}; give Disaggregation()"
            )
    return None


def _is_deep(check: object, *, steps_only: bool) -> bool:
    """Return whether to replay the run by steps. ConfigError: not a kind of check, or nothing is fast-forwarded."""
    if isinstance(check, bool):
        return False
    if check != "deep":
        raise ConfigError(f"check must be True, False or 'deep', got {check!r}")
    if steps_only:
        raise ConfigError(
            "check='deep' replays fast-forwards, and fast_forward=False, record_steps, keep_steps and on_step_end turn "
            "them off; use check=True"
        )
    return True


def _check(load: object, routing: object, timing: object, progress: object, **switches: object) -> None:
    """Raise ConfigError for an argument of the wrong type."""
    if isinstance(timing, str | type):
        raise ConfigError(f"timing must be a TimingModel, an object with its methods, got {timing!r}")
    if not isinstance(load, OpenLoop | ClosedLoop | Lockstep):
        raise ConfigError(f"load must be an OpenLoop, ClosedLoop or Lockstep, got {load!r}")
    if routing is None or isinstance(routing, type):
        raise ConfigError(
            f"routing must be {', '.join(get_args(Routing))}, a KvRouting or a Router with choose(request, view), "
            f"not a class; got {routing!r}"
        )
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress must be a function of the number of finished requests, got {progress!r}")


def _sort_by_arrival(
    workload: Workload, load: OpenLoop | ClosedLoop | Lockstep
) -> tuple[Workload, npt.NDArray[np.int64] | None]:
    """Return the rows in order of arrival at the load's rate, and that order (None: unchanged)."""
    if isinstance(load, ClosedLoop):
        return workload, None
    if isinstance(load, OpenLoop) and not workload.has_arrivals:
        raise ConfigError(
            "the workload has no timestamps; replay it closed loop (--concurrency N, or load=ClosedLoop(N))"
        )
    order = workload.arrival_order()
    workload = workload if order is None else workload.take(order)
    if isinstance(load, OpenLoop):
        workload = workload.normalised().scale_arrival_rate(load.arrival_rate_scale)
    return workload, order


def _build_router(
    routing: Routing | KvRouting | Router | NativeRouter, fleet: FleetPlan, seed: int
) -> Routing | Router | NativeRouter:
    if isinstance(routing, KvRouting):
        return routing.build(seed)
    if fleet.ranks > 1 and has_front(fleet.deployments, routing):
        return RankFront(fleet.engine.profile)
    return routing


def _list_request_names(
    workload: Workload, order: npt.NDArray[np.int64] | None, engine: EngineConfig
) -> list[str]:
    """Return request names for error messages (empty: rows are used). Under priorities, names break ties."""
    if engine.orders_by_name:
        return workload.request_ids or []
    return [] if order is None else list(map(str, order.tolist()))


def _run_recorded(
    run: Callable[..., FleetResult],
    path: str | PathLike[str],
    workload: Workload,
    order: npt.NDArray[np.int64] | None,
    fleet: FleetPlan,
    *,
    timed: bool,
    keep_events: bool,
) -> FleetResult:
    from understudy.run.step_file import StepFile

    with create_trace(path) as file:
        rows = range(len(workload)) if order is None else order.tolist()
        names = workload.request_ids or list(map(str, rows))
        steps = StepFile(
            file, workload, names, fleet.engine, workers=fleet.workers, timed=timed, keep_events=keep_events
        )
        result = run(names=names, on_step=steps.on_step)
        steps.finish()
    return result


def _ends(tell: Callable[[int, int], None]) -> Callable[[int, VllmEngine, bool], None]:
    def on_step(worker: int, engine: VllmEngine, ended: bool) -> None:
        if ended:
            tell(worker, engine.now_ns)

    return on_step

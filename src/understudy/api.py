"""`understudy.replay`: replay a trace and build its report.

A request passes from here to a block through `replay` → `run.offline.run_offline` → `_core.run_fleet` (core/replay) →
an engine's step (core/engine) → the block store (core/store).
"""

from __future__ import annotations

import inspect
import time
from copy import deepcopy
from dataclasses import fields, replace
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from understudy.checks import check_model, switch
from understudy.engines.kinds.registry import DEFAULT_ENGINE
from understudy.engines.timing import Polynomial
from understudy.errors import ConfigError
from understudy.outputs import check_outputs, files_named
from understudy.report.goodput import Slo
from understudy.report.report import Report
from understudy.router.kv import KvRouter, KvRouting
from understudy.run.disaggregation import Disaggregation
from understudy.run.kv_log import can_explain_misses
from understudy.run.offline import run_offline
from understudy.run.on_gpu import place_on_gpu
from understudy.run.options import Execution, Outputs
from understudy.run.pools import WorkerPool
from understudy.run.profile_run import run_profile
from understudy.run.routed import write_decisions
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig
from understudy.version import __version__
from understudy.workload import Plays, Workload, read_trace
from understudy.workload.block_tokens import TokenSource
from understudy.workload.formats import TraceOptions
from understudy.workload.users import check_load, check_users, scale_users

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Never

    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.timing import TimingModel
    from understudy.run.autoscale import Autoscale
    from understudy.run.faults import FaultPlan
    from understudy.run.routing_choice import RoutingChoice
    from understudy.run.session_kv import SessionKv
    from understudy.tiers.gpu import GpuSettings
    from understudy.workload import ClosedLoop, Lockstep, OpenLoop


def replay(
    workload: Workload | str | PathLike[str],
    engine: EngineConfig | None = None,
    *,
    model: str | None = None,
    gpu: str | GpuSettings | None = None,
    workers: int = 1,
    pools: Sequence[WorkerPool] = (),
    routing: RoutingChoice = "round_robin",
    seed: int = 0,
    users: float = 1.0,
    load: OpenLoop | ClosedLoop | Lockstep | Plays | None = None,
    max_tokens: int | None = None,
    timing: TimingModel | None = None,
    tiers: TiersConfig | None = None,
    compare_without_tiers: bool = False,
    slo: Slo | None = None,
    ranks: bool = False,
    disaggregation: Disaggregation | None = None,
    autoscale: Autoscale | None = None,
    session_kv: SessionKv | None = None,
    faults: FaultPlan | None = None,
    outputs: Outputs | None = None,
    execution: Execution | None = None,
    trace_options: TraceOptions | None = None,
    **unknown: Never,
) -> Report:
    """Replay a workload or a trace file in simulation and return the report.

    `model` and `gpu` give step times and KV blocks; timing and blocks that `engine` sets are kept. Without them, step
    times are those of a generic polynomial. Requests that can never fit are rejected and reported.

    Parameters:
        workload: path of a trace file, or a Workload, such as `read_trace` returns.
        engine: settings of each worker's engine (default: VllmConfig()).
        model: name of a known model, such as Llama-3.1-8B, or path of a Hugging Face config.json.
        gpu: name of a GPU, such as H100, or `understudy.tiers.gpu.GpuSettings` (parallel sizes, a custom GPU).
        workers: number of equal workers.
        pools: groups of workers that differ (`understudy.run.pools.WorkerPool`), instead of `engine`, `workers` and
            `tiers`.
        routing: round_robin, random, least_loaded, power_of_two, session_affinity, session_tree or kv; or KvRouting; or
            a user-defined `understudy.router.Router`.
        seed: seed of random choices, from 0; equal seeds give equal runs.
        users: users relative to those of the trace, such as 2 or 0.1: sessions are copied or sampled
            (`understudy.workload.scale_users`); not for a `ClosedLoop`, which has its own load.
        load: `understudy.workload.OpenLoop` (at the timestamps, the default), `ClosedLoop` (N sessions at a time),
            `Lockstep`, or `Plays` (requests that wait for one another; the default for these).
        max_tokens: limit on the output tokens of requests without a limit of their own.
        timing: user-defined timing model, instead of the engine's.
        tiers: KV tiers below the GPU: host memory, disk, object store.
        compare_without_tiers: replay again without tiers, into `report.without_tiers`; a user-defined Router is copied
            with copy.deepcopy for the second run.
        slo: latency objectives in ms (`understudy.report.Slo`), for goodput.
        ranks: data-parallel ranks share experts and step together: those of each worker, or all workers of one rank.
        disaggregation: prefill and decode workers (`Disaggregation`); `routing` then chooses prefill workers.
        autoscale: a scaler that orders workers during the run (`understudy.run.autoscale.Autoscale`); `workers` are
            those at the start.
        session_kv: policies for the KV of sessions between their requests (`understudy.run.session_kv.SessionKv`).
        faults: what fails during the run, and what becomes of requests that lose their worker
            (`understudy.run.faults.FaultPlan`).
        outputs: files to write.
        execution: threads, checks and progress; the report is equal for every choice.
        trace_options: options of `read_trace` by name, if `workload` is a path.

    Errors: ConfigError names the wrong argument and a remedy; InvalidArgument a bad row of the trace; WrongState the
    requests of a run that makes no progress.

    Example:
        report = us.replay("trace.jsonl", model="Llama-3.1-8B", gpu="H100", workers=2)
        print(report.ttft_ms.p99, report.run.digest)
        for verdict in report.verdicts:
            print(verdict.finding, verdict.remedy)
    """
    started = time.perf_counter()
    if not isinstance(workload, Workload | str | PathLike):
        raise ConfigError(f"workload must be a Workload or the path of a trace, got {workload!r}")
    check_model(model)
    switch("compare_without_tiers", compare_without_tiers)
    check_users(users)
    check_load(users, load)
    if not isinstance(slo, Slo | None):
        raise ConfigError(f"slo must be an Slo, got {slo!r}")
    for option in unknown:
        if option in _REPLACEMENTS:
            raise ConfigError(f"{option} is not a parameter of replay; give {_REPLACEMENTS[option]}")
        similar = get_close_matches(option, _PARAMETERS, 1)
        hint = f"did you mean {similar[0]}?" if similar else f"known are {', '.join(_PARAMETERS)}"
        raise ConfigError(f"{option} is not a parameter of replay; {hint}")
    outputs = Outputs() if outputs is None else outputs
    execution = Execution() if execution is None else execution
    if not isinstance(outputs, Outputs):
        raise ConfigError(f"outputs must be Outputs, got {outputs!r}")
    if not isinstance(execution, Execution):
        raise ConfigError(f"execution must be an Execution, got {execution!r}")
    if not isinstance(trace_options, dict | None):
        raise ConfigError(f"trace_options must be options by name, got {trace_options!r}")
    if pools and compare_without_tiers:
        raise ConfigError("compare_without_tiers does not support pools; leave out one of them")
    if (
        compare_without_tiers
        and not WorkerPool(engine=engine or DEFAULT_ENGINE, tiers=tiers).resolve_tiers().tiers
    ):
        raise ConfigError("compare_without_tiers needs tiers to compare with; add a g2 tier (--g2)")
    placed: tuple[str, ...] = ()
    if gpu is not None:
        if pools or timing is not None:
            raise ConfigError(
                f"gpu: {'pools have engines of their own' if pools else 'timing also sets the step times'}; "
                "leave out one of them"
            )
        engine, tiers, together, placed = place_on_gpu(model, gpu, engine or DEFAULT_ENGINE, tiers)
        ranks = ranks or together
    elif model is not None:
        raise ConfigError("model: step times need a GPU too; give gpu, such as H100 (KV sizes: tiers.model)")
    if disaggregation is not None:
        if not isinstance(disaggregation, Disaggregation):
            raise ConfigError(f"disaggregation must be a Disaggregation, got {disaggregation!r}")
        disaggregation = disaggregation.sized_for(model)
    routing_without_tiers = _copy_routing(routing) if compare_without_tiers else routing
    inputs = files_named(
        {"engine": engine, "timing": timing, "tiers": tiers, "pools": pools, **(trace_options or {})}
    )
    check_outputs(
        outputs.paths(), inputs if isinstance(workload, Workload) else {"workload": workload, **inputs}
    )
    name = "workload"
    if not isinstance(workload, Workload):
        name = Path(workload).name
        workload = read_trace(workload, **(trace_options or {}))
    elif trace_options:
        raise ConfigError(
            f"{next(iter(trace_options))} is for reading a trace file, but a Workload was given; leave it out"
        )
    workload = scale_users(workload, users, seed=seed)
    if max_tokens is not None:
        workload = workload.limited(max_tokens)
    keeps_steps = execution.keep_steps or outputs.save_run is not None or outputs.perfetto is not None
    plan = RunPlan(
        workload,
        engine,
        workers=workers,
        pools=pools,
        routing=routing,
        seed=seed,
        load=load,
        timing=timing,
        tiers=tiers,
        disaggregation=disaggregation,
        autoscale=autoscale,
        session_kv=session_kv,
        faults=faults,
        ranks=ranks,
        threads=execution.threads,
        fast_forward=execution.fast_forward,
        check=execution.check,
        progress=execution.progress,
        events=outputs.events is not None or outputs.raw_events is not None,
        kv_trace=outputs.kv_trace is not None,
        record_steps=outputs.record_steps,
        keep_steps=keeps_steps,
        keep_candidates=outputs.decisions is not None
        or (keeps_steps and (routing == "kv" or isinstance(routing, KvRouting))),
    )
    if isinstance(load, Plays) and load.is_profile:
        run, workload = run_profile(plan)
    else:
        plan = replace(plan, keep_misses=keeps_steps and can_explain_misses(plan))
        run = run_offline(plan)
    routed = run.choices if run.decisions is None else run.decisions
    if outputs.decisions is not None and routed is not None:
        write_decisions(outputs.decisions, routed, run.timeline)
    if run.kv is not None:
        tokens = TokenSource(workload, run.timeline.block_size) if outputs.synthesize_tokens else None
        run.kv.write(
            events=outputs.events, raw_events=outputs.raw_events, kv_trace=outputs.kv_trace, tokens=tokens
        )
    engines = [pool.engine for pool in pools] if pools else [engine or DEFAULT_ENGINE]
    notes = (
        *run.notes,
        *placed,
        *_note_generic_times(tiers, engine, timing),
        *(note for one in engines for note in one.notes(own_times=timing is not None)),
    )
    facts = replace(
        run.facts,
        understudy=__version__,
        **workload.describe(name),
        max_tokens=None if max_tokens is None else int(max_tokens),
        raw_stream=run.kv.raw_distance() if run.kv is not None and outputs.raw_events is not None else {},
    )
    facts = replace(facts, notes=(*workload.notes, *notes))
    saved = None
    if run.steps is not None:
        from understudy.explain.misses import find_misses
        from understudy.explain.outputs import write_run
        from understudy.explain.saved_run import SavedRun

        misses = None
        if plan.keep_misses and run.kv is not None:
            misses = find_misses(workload, run.timeline, run.kv, run.steps)
        saved = SavedRun.of(run.timeline, run.steps, facts, routed, misses)
        write_run(saved, save_run=outputs.save_run, perfetto=outputs.perfetto)
    report = Report.build(run.timeline, facts, slo)
    facts = replace(facts, wall_time_s=time.perf_counter() - started)
    report = replace(report, run=facts, workload=workload, decisions=routed, saved=saved)
    if not compare_without_tiers:
        return report
    started = time.perf_counter()
    run = run_offline(
        replace(
            plan,
            engine=msgspec.structs.replace(engine or DEFAULT_ENGINE, tiers=TiersConfig()),
            routing=routing_without_tiers,
            tiers=None,
            events=False,
            kv_trace=False,
            record_steps=None,
            keep_steps=False,
            keep_candidates=False,
        )
    )
    facts = replace(run.facts, workload=f"{name} without tiers")
    without = Report.build(run.timeline, facts, slo)
    facts = replace(facts, wall_time_s=time.perf_counter() - started)
    return replace(report, without_tiers=replace(without, run=facts))


def _copy_routing(routing: RoutingChoice) -> RoutingChoice:
    """Copy a user-defined router before a run changes its state; return other routing as it is."""
    if isinstance(routing, str | KvRouting | KvRouter):  # these reset their state when a run begins
        return routing
    try:
        return deepcopy(routing)
    except Exception as error:  # user-defined code may raise anything
        raise ConfigError(
            f"compare_without_tiers needs a copy of routing {type(routing).__qualname__}, and copy.deepcopy fails: "
            f"{error}; give the router a __deepcopy__, or run a second replay without tiers"
        ) from error


def _note_generic_times(
    tiers: TiersConfig | None, engine: EngineConfig | None, timing: TimingModel | None
) -> list[str]:
    """Note that a model name alone sets KV sizes but not step times."""
    model = None if tiers is None else tiers.model
    if model is None or timing is not None or not isinstance((engine or DEFAULT_ENGINE).timing, Polynomial):
        return []
    return [
        f"{model} sets the KV bytes per token only; step times are those of the generic polynomial, not of this model "
        "(add a GPU, or set engine.timing)"
    ]


_REPLACEMENTS = {
    "concurrency": "load=ClosedLoop(N)",
    "arrival_rate_scale": "load=OpenLoop(arrival_rate_scale=X)",
    "speed_up": "load=OpenLoop(arrival_rate_scale=X)",
    "leaping": "execution=Execution(fast_forward=False)",
    "route_rejected": "engine=VllmConfig(mocker=MockerSettings(route_rejected=True))",
}
"""Names that users try as parameters (flags, former names), and the parameter to use instead."""

_REPLACEMENTS |= {field.name: f"outputs=Outputs({field.name}=…)" for field in fields(Outputs)}
_REPLACEMENTS |= {field.name: f"execution=Execution({field.name}=…)" for field in fields(Execution)}
_REPLACEMENTS |= {name: f'trace_options={{"{name}": …}}' for name in TraceOptions.__annotations__}
_PARAMETERS = [name for name in inspect.signature(replay).parameters if name != "unknown"]

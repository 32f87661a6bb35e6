"""`understudy.replay`: replay a trace and build its report.

A request passes from here to a block through `replay` → `run.offline.run_offline` → `_core.run_fleet` (core/replay) →
an engine's step (core/engine) → the block store (core/store).
"""

from __future__ import annotations

import inspect
import time
from copy import deepcopy
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from understudy import __version__
from understudy.engines.kinds import DEFAULT_ENGINE
from understudy.engines.timing import Polynomial
from understudy.errors import ConfigError
from understudy.events.synthesize import TokenSource
from understudy.outputs import check_outputs, files_named
from understudy.report.goodput import Slo
from understudy.report.report import Report
from understudy.router.kv import KvRouter, KvRouting
from understudy.run.offline import run_offline
from understudy.run.on_gpu import place_on_gpu
from understudy.run.pools import WorkerPool
from understudy.run.routed import write_decisions
from understudy.tiers.settings import TiersConfig
from understudy.workload import Workload, read_trace
from understudy.workload.reuse import hit_curve, unlimited_hit_ratio

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.timing import TimingModel
    from understudy.router import Router
    from understudy.run.offline import Routing
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
    routing: Routing | KvRouting | Router = "round_robin",
    seed: int = 0,
    load: OpenLoop | ClosedLoop | Lockstep | None = None,
    max_tokens: int | None = None,
    timing: TimingModel | None = None,
    tiers: TiersConfig | None = None,
    compare_without_tiers: bool = False,
    slo: Slo | None = None,
    threads: int = 1,
    fast_forward: bool = True,
    check: bool | Literal["deep"] = False,
    ranks: bool = False,
    events: str | PathLike[str] | None = None,
    raw_events: str | PathLike[str] | None = None,
    synthesize_tokens: bool = False,
    kv_trace: str | PathLike[str] | None = None,
    progress: Callable[[int], None] | None = None,
    record_steps: str | PathLike[str] | None = None,
    decisions: str | PathLike[str] | None = None,
    **trace_options: Any,
) -> Report:
    """Replay a workload or a trace file in simulation and return the report.

    `model` and `gpu` (such as "Llama-3.1-8B" and "H100") give step times and KV blocks; timing and blocks that `engine`
    sets are kept.
    The arguments are those of `understudy.run.offline.run_offline`, plus files to write as JSON lines: `events`
    (consolidated KV events), `raw_events` (KV events as engines send them), `kv_trace` (block allocations and
    evictions) and `decisions` (costs behind each choice of a KV-aware router). `slo` sets the objectives for goodput;
    `trace_options` go to the trace's reader. The report's `wall_time_s` covers opening the file to the finished report.
    `synthesize_tokens` adds generated token ids and their local hashes to event lines (equal hash ids, equal tokens).
    `max_tokens` cuts the output of requests without a limit of their own. `fast_forward=False` simulates every decode
    step one by one, with the same result. `compare_without_tiers` replays the workload again without tiers, into
    `report.without_tiers`; a user-defined `Router` is copied (`copy.deepcopy`) before the first run, for the second.
    """
    started = time.perf_counter()
    if not isinstance(workload, Workload | str | PathLike):
        raise ConfigError(f"workload must be a Workload or the path of a trace, got {workload!r}")
    if not isinstance(slo, Slo | None):
        raise ConfigError(f"slo must be an Slo, got {slo!r}")
    if not isinstance(fast_forward, bool):
        raise ConfigError(f"fast_forward must be True or False, got {fast_forward!r}")
    for option in trace_options:
        if option in _REPLACEMENTS:
            raise ConfigError(f"{option} is not a parameter of replay; give {_REPLACEMENTS[option]}")
        if similar := get_close_matches(option, _PARAMETERS, 1):
            raise ConfigError(f"{option} is not a parameter of replay; did you mean {similar[0]}?")
    outputs = {
        "events": events,
        "raw_events": raw_events,
        "kv_trace": kv_trace,
        "record_steps": record_steps,
        "decisions": decisions,
    }
    for name, path in outputs.items():
        if not isinstance(path, str | PathLike | None):
            raise ConfigError(f"{name} must be the path of a file to write, got {path!r}")
    if decisions is not None and routing != "kv" and not isinstance(routing, KvRouting | KvRouter):
        raise ConfigError("decisions are recorded by KV-aware routing only; choose routing kv")
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
        engine, tiers, workers, together, placed = place_on_gpu(
            model, gpu, engine or DEFAULT_ENGINE, tiers, workers
        )
        ranks = ranks or together
    elif model is not None:
        raise ConfigError("model: step times need a GPU too; give gpu, such as H100 (KV sizes: tiers.model)")
    routing_without_tiers = _copy_routing(routing) if compare_without_tiers else routing
    if synthesize_tokens:
        lines = [path for path in (events, raw_events) if path is not None]
        if not lines or any(fspath(path).endswith(".npz") for path in lines):
            raise ConfigError(
                "synthesize_tokens needs events written as JSON lines; name a .jsonl file for them"
            )
    inputs = files_named(
        {"engine": engine, "timing": timing, "tiers": tiers, "pools": pools, **trace_options}
    )
    check_outputs(outputs, inputs if isinstance(workload, Workload) else {"workload": workload, **inputs})
    name = "workload"
    if not isinstance(workload, Workload):
        name = Path(workload).name
        workload = read_trace(workload, **trace_options)
    elif trace_options:
        raise ConfigError(
            f"{next(iter(trace_options))} is for reading a trace file, but a Workload was given; leave it out"
        )
    if max_tokens is not None:
        workload = workload.limited(max_tokens)
    options: dict[str, Any] = {
        "workers": workers,
        "pools": pools,
        "routing": routing,
        "seed": seed,
        "load": load,
        "timing": timing,
        "threads": threads,
        "fast_forward": fast_forward,
        "check": check,
        "ranks": ranks,
        "progress": progress,
    }
    run = run_offline(
        workload,
        engine,
        tiers=tiers,
        events=events is not None or raw_events is not None,
        kv_trace=kv_trace is not None,
        record_steps=record_steps,
        **options,
    )
    if decisions is not None and run.decisions is not None:
        write_decisions(decisions, run.decisions, run.timeline)
    limit = {} if max_tokens is None else {"max_tokens": int(max_tokens)}
    if run.kv is not None:
        tokens = TokenSource(workload, run.timeline.block_size) if synthesize_tokens else None
        run.kv.write(events=events, raw_events=raw_events, kv_trace=kv_trace, tokens=tokens)
    engines = [pool.engine for pool in pools] if pools else [engine or DEFAULT_ENGINE]
    notes = [
        *workload.notes,
        *run.notes,
        *placed,
        *_note_generic_times(tiers, engine, timing),
        *(note for one in engines for note in one.notes()),
    ]
    facts = {
        "understudy": __version__,
        **workload.describe(name),
        **({"notes": notes} if notes else {}),
        **run.facts,
        **limit,
    }
    if run.kv is not None and raw_events is not None:
        facts["raw_stream"] = run.kv.raw_distance()
    report = Report.build(run.timeline, facts, slo)
    report = report.with_run(wall_time_s=time.perf_counter() - started)
    block_size = run.timeline.block_size
    report = replace(
        report,
        compute_unlimited_hits=partial(unlimited_hit_ratio, workload, block_size),
        compute_routed_hits=partial(unlimited_hit_ratio, workload, block_size, run.timeline.worker)
        if run.timeline.num_workers > 1
        else None,
        compute_hit_curve=partial(hit_curve, workload, block_size),
        decisions=run.decisions,
    )
    if not compare_without_tiers:
        return report
    started = time.perf_counter()
    engine_without_tiers = msgspec.structs.replace(engine or DEFAULT_ENGINE, tiers=TiersConfig())
    run = run_offline(workload, engine_without_tiers, **{**options, "routing": routing_without_tiers})
    without = Report.build(run.timeline, {"workload": f"{name} without tiers", **run.facts}, slo)
    return replace(report, without_tiers=without.with_run(wall_time_s=time.perf_counter() - started))


def _copy_routing(routing: Routing | KvRouting | Router) -> Routing | KvRouting | Router:
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
    "leaping": "fast_forward",
    "route_rejected": "engine=VllmConfig(mocker=MockerSettings(route_rejected=True))",
}
"""Names that users try as parameters (flags, former names), and the parameter to use instead."""

_PARAMETERS = list(inspect.signature(replay).parameters)

"""Online replay of a workload: builds its fleet and the report."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.errors import ConfigError
from understudy.fleets.fleet import FleetSettings
from understudy.online.player import Player
from understudy.run.cut_outputs import note_cut_outputs
from understudy.run.facts import RunFacts  # noqa: TC001  (msgspec reads the annotation)
from understudy.run.pools import WorkerPool
from understudy.server.loop import run
from understudy.server.settings import ServerSettings
from understudy.workload.arrivals import OpenLoop, Plays

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.engines.engine_config import EngineConfig
    from understudy.report import Report, Slo
    from understudy.router.kv import KvRouting
    from understudy.router.router import Router
    from understudy.run.session_kv import SessionKv
    from understudy.run.timeline import Timeline
    from understudy.tiers.settings import TiersConfig
    from understudy.workload import Workload

_RESERVE = 8
"""Tokens of a context that no request fills: vLLM's front end keeps 1, SGLang 6."""


class OnlineRun(msgspec.Struct, frozen=True):
    """The result of a run: its columns, and facts with the machine's lateness."""

    timeline: Timeline
    facts: RunFacts


def run_online(
    workload: Workload,
    engine: EngineConfig,
    *,
    workers: int = 1,
    routing: str | KvRouting | Router = "round_robin",
    seed: int = 0,
    arrival_rate_scale: float = 1.0,
    clock_speed: float = 1.0,
    tiers: TiersConfig | None = None,
    progress: Callable[[int], None] | None = None,
    plays: Plays | None = None,
    session_kv: SessionKv | None = None,
) -> OnlineRun:
    """Replay an open-loop workload, or plays, on live workers, on a clock `clock_speed` times as fast as real time.

    `arrival_rate_scale` divides the workload's timestamps, as offline. A turn is sent when the turn before has ended.
    """
    if workload.graph is not None and plays is None:
        plays = Plays(arrival_rate_scale=arrival_rate_scale)
    if plays is not None and workload.graph is None:
        raise ConfigError("plays: the requests do not wait for one another; leave out --lanes and --clock")
    if plays is not None and workload.graph is not None:
        if plays.is_profile or any(plays.idle_caps_s):
            raise ConfigError(
                "--online runs every play once, to its end; leave out --warm-up, --duration and caps of idle time"
            )
        arrival_rate_scale = plays.arrival_rate_scale
        if plays.clock == "client":
            workload = replace(workload, graph=workload.graph.without_floors())
    if not workload.has_arrivals and not (plays is not None and plays.lanes):
        raise ConfigError("--online needs a workload with timestamps")
    if workload.adapter is not None:
        raise ConfigError("--online does not send adapters yet: replay the workload offline")
    if engine.data_parallel_size > 1:
        raise ConfigError(
            "--online plays workers of one rank: leave data_parallel_size at 1, give more workers"
        )
    workload = workload.normalised().scale_arrival_rate(arrival_rate_scale)
    tokens = workload.prompt_tokens.astype(np.int64) + workload.output_tokens
    asked = (
        tokens
        if workload.max_tokens is None
        else workload.prompt_tokens + np.maximum(workload.output_tokens, workload.max_tokens.astype(np.int64))
    )
    length = max(engine.max_model_len or 0, int(asked.max(initial=1)) + _RESERVE)
    most = engine.num_gpu_blocks * engine.block_size
    pool = WorkerPool(engine=engine, workers=workers, tiers=tiers)
    pool.reject_unused_kv_size()
    below = pool.resolve_tiers()
    settings = ServerSettings(
        model="online",
        max_model_len=min(length, most),
        engine=msgspec.structs.replace(engine, max_model_len=min(length, most)),
        tiers=below,
        most_blocks=int((-(-tokens // engine.block_size)).sum()),
        clock_speed=clock_speed,
        seed=seed,
        session_kv=session_kv,
    )
    fleet = FleetSettings(pools=((workers, settings),), base_port=0, port=0, routing=routing, seed=seed)
    lanes = 0 if plays is None else plays.lanes
    timeline, facts = run(Player(workload, fleet, engine, progress, lanes).play())
    tiers_used = below.describe() if below.tiers else {}
    load = OpenLoop(arrival_rate_scale=arrival_rate_scale) if plays is None else plays
    return OnlineRun(timeline, replace(facts, load=load, tiers=tiers_used))


def replay_online(
    workload: Workload,
    name: str,
    engine: EngineConfig,
    *,
    workers: int = 1,
    routing: str | KvRouting | Router = "round_robin",
    seed: int = 0,
    arrival_rate_scale: float = 1.0,
    clock_speed: float = 1.0,
    tiers: TiersConfig | None = None,
    slo: Slo | None = None,
    progress: Callable[[int], None] | None = None,
    plays: Plays | None = None,
    session_kv: SessionKv | None = None,
) -> Report:
    """Run a workload with `run_online` and build the report of a replay."""
    from understudy.report import Report
    from understudy.run.digest import digests

    started_s = time.perf_counter()
    run = run_online(
        workload,
        engine,
        workers=workers,
        routing=routing,
        seed=seed,
        arrival_rate_scale=arrival_rate_scale,
        clock_speed=clock_speed,
        tiers=tiers,
        progress=progress,
        plays=plays,
        session_kv=session_kv,
    )
    facts = replace(run.facts, **workload.describe(name), **digests(run.timeline))
    facts = replace(facts, notes=(*workload.notes, *note_cut_outputs(run.timeline)))
    report = Report.build(run.timeline, facts, slo)
    return replace(report, run=replace(facts, wall_time_s=time.perf_counter() - started_s))

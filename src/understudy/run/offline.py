"""Offline replay: a workload through simulated workers on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
import numpy as np

from understudy._core import FleetSettings, Pool, run_fleet
from understudy.checks import whole_number
from understudy.engines.config import VllmConfig, scheduling_in_words
from understudy.engines.offload import vllm_offload
from understudy.engines.profiles import profile_named
from understudy.errors import ConfigError
from understudy.memory import SLOT_BYTES, TIERS_BYTES, WORKER_BYTES, require_memory
from understudy.router.kv import Decisions, KvRouter, KvRouting
from understudy.run.digest import digests
from understudy.run.kv_log import KvLog
from understudy.run.pools import WorkerPool, check_pools
from understudy.run.ranks import RankFront, ranks_of
from understudy.run.routed import summarise
from understudy.run.timeline import Timeline
from understudy.run.times import described_times, front_end_ns, seen_by_client
from understudy.tiers.native import slots_for, to_core
from understudy.tiers.plan import TierPlan
from understudy.workload import ClosedLoop, Lockstep, OpenLoop, Workload
from understudy.workload.arrivals import LOCKSTEP_NS
from understudy.workload.files import create_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from os import PathLike

    from understudy._core import Engine, NativeRouter
    from understudy.engines.timing import TimingModel
    from understudy.router import Router
    from understudy.tiers.settings import TiersConfig

Routing = Literal["round_robin", "random", "least_loaded", "power_of_two", "session_affinity", "kv"]


class OfflineRun(msgspec.Struct, frozen=True):
    """What a run left: its columns, the facts to reproduce it (with its digest), and its blocks' history if kept."""

    timeline: Timeline
    facts: dict[str, Any]
    kv: KvLog | None = None
    decisions: Decisions | None = None
    """Of a KV-aware router, with the rows of the workload as it was given."""


def run_offline(
    workload: Workload,
    engine: VllmConfig | None = None,
    *,
    workers: int = 1,
    pools: Sequence[WorkerPool] = (),
    routing: Routing | KvRouting | Router | NativeRouter = "round_robin",
    seed: int = 0,
    load: OpenLoop | ClosedLoop | Lockstep | None = None,
    timing: TimingModel | None = None,
    tiers: TiersConfig | None = None,
    threads: int = 1,
    leaping: bool = True,
    check: bool = False,
    events: bool = False,
    kv_trace: bool = False,
    progress: Callable[[int], None] | None = None,
    record_steps: str | PathLike[str] | None = None,
    route_rejected: bool = False,
    on_step_end: Callable[[int, int], None] | None = None,
    ranks: bool = False,
) -> OfflineRun:
    """Play a workload to its end.

    `pools` describes a fleet whose workers are not all alike, in place of `engine`, `workers` and `tiers`. `routing` is
    a name, settings of the KV-aware router (`KvRouting`), or a `Router` of your own; `route_rejected` asks it about
    requests that can never fit, too, before they are rejected, as Dynamo's replay does.
    `load` defaults to an open loop at the workload's own pace; `timing` is a model of your own, in place of the
    engine's. `tiers` lie below the device; unless given, those that came with the engine's settings. `threads` > 1
    needs workers that are independent: open loop, single-turn requests, round-robin or random routing, neither g3 nor
    g4. `check` verifies, after every step, conservation and that an index fed by the events alone knows exactly
    the blocks that are there (InvariantViolated); `events` and `kv_trace` keep the run's KV events, and its
    allocations and evictions; `leaping` off plays every decode step by itself, with the same result. `record_steps`
    names a file for every step of every worker, in the form of a recorded schedule (gzipped when its name ends in .gz);
    `on_step_end` is told the worker and the time (ns) at the end of every step. Both see every step by itself. `ranks`
    says that workers are data-parallel ranks of one model with experts: they step together, as long as the slowest.
    Requests that can never fit are rejected and reported; a run without progress raises WrongState and says who is
    stuck.
    """
    load = OpenLoop() if load is None else load
    if pools and (engine is not None or workers != 1 or tiers is not None):
        raise ConfigError(
            "pools have engines, workers and tiers of their own: leave engine, workers and tiers out"
        )
    pools = pools or [
        WorkerPool(engine=VllmConfig() if engine is None else engine, workers=workers, tiers=tiers)
    ]
    check_pools(pools)
    rank_count = ranks_of(pools, routing)
    deployments = sum(pool.workers for pool in pools)
    pools = [msgspec.structs.replace(pool, workers=pool.workers * rank_count) for pool in pools]
    engine = pools[0].engine
    workers = sum(pool.workers for pool in pools)
    if isinstance(timing, str | type):
        raise ConfigError(f"timing must be a TimingModel, an object with its methods, got {timing!r}")
    if not isinstance(load, OpenLoop | ClosedLoop | Lockstep):
        raise ConfigError(f"load must be an OpenLoop, ClosedLoop or Lockstep, got {load!r}")
    if routing is None or isinstance(routing, type):
        raise ConfigError(
            f"routing must be {', '.join(get_args(Routing))}, a KvRouting or a Router with choose(request, view), "
            f"not a class of them; got {routing!r}"
        )
    yes_or_no = {"leaping": leaping, "check": check, "ranks": ranks, "route_rejected": route_rejected}
    for name, value in yes_or_no.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False, got {value!r}")
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress must be a function of the requests that are done, got {progress!r}")
    seed = whole_number("seed", seed, 0, 2**64 - 1)
    threads = whole_number("threads", threads, 1, 4096)
    given, order = workload, None
    if isinstance(load, OpenLoop) and not workload.has_arrivals:
        raise ConfigError("the workload has no timestamps: replay it closed loop, with a concurrency")
    if not isinstance(load, ClosedLoop):
        order = workload.arrival_order()
        workload = workload if order is None else workload.take(order)
    if isinstance(load, OpenLoop):
        workload = workload.normalised().speed_up(load.speed_up)
    if workload.adapter is not None and not all(pool.engine.enable_lora for pool in pools):
        raise ConfigError(
            f"the workload names LoRA adapters ({', '.join(workload.adapters[:3])}): set enable_lora, and max_loras"
        )
    if routing == "kv":
        routing = KvRouting()
    router = routing.build(seed) if isinstance(routing, KvRouting) else routing
    if rank_count > 1 and isinstance(routing, str):
        profile = profile_named(engine.vllm_version)
        router = RankFront(routing, workload, deployments, rank_count, seed=seed, profile=profile)
    plans = [TierPlan.of(pool.below(), pool.engine.block_size) for pool in pools]
    _require_memory(pools, plans, [_blocks_of(workload, pool.engine) for pool in pools])
    fleet = [
        Pool(
            engine=pool.engine.native(
                events=events or record_steps is not None,
                kv_trace=kv_trace,
                offload=vllm_offload(plan, pool.engine, _blocks_of(workload, pool.engine)),
            ),
            timing=pool.engine.native_timing(timing),
            workers=pool.workers,
            tiers=None if plan is None else to_core(plan, _blocks_of(workload, pool.engine), seed=seed),
            name=pool.name,
        )
        for pool, plan in zip(pools, plans, strict=True)
    ]
    outside_ns = front_end_ns(pools, timing)
    if outside_ns:  # a client that has its answer that much later asks the next that much later
        workload = replace(workload, delay_ns=workload.delay_ns + outside_ns * (workload.turn > 0))
    settings = FleetSettings(
        pools=fleet,
        routing=router,
        seed=seed,
        concurrency=load.concurrency if isinstance(load, ClosedLoop) else 0,
        threads=threads,
        leaping=leaping,
        check=check,
        route_rejected=route_rejected,
        lockstep_ns=LOCKSTEP_NS if isinstance(load, Lockstep) else 0,
        ranks=ranks,
        turnaround_ns=round(load.turnaround_ms * 1e6) + outside_ns if isinstance(load, ClosedLoop) else 0,
    )
    play = partial(run_fleet, workload, settings, progress=progress)
    if record_steps is None:
        by_name = engine.scheduling_policy == "priority" and workload.request_ids is not None
        names = (workload.request_ids or []) if by_name else []
        if order is not None and engine.scheduling_policy != "priority":  # there, names break ties
            names = list(map(str, order.tolist()))
        result = play(names=names, on_step=None if on_step_end is None else _ends(on_step_end))
    else:
        from understudy.run.step_file import StepFile

        with create_trace(record_steps) as file:
            timed = not isinstance(load, Lockstep)
            rows = range(len(workload)) if order is None else order.tolist()
            names = workload.request_ids or list(map(str, rows))
            steps = StepFile(file, workload, names, engine, workers=workers, timed=timed, keep_events=events)
            result = play(names=names, on_step=steps.on_step)
            steps.finish()
    timeline = Timeline.of(
        result,
        given,
        order,
        worker_blocks=[pool.engine.num_gpu_blocks for pool in pools for _ in range(pool.workers)],
        block_size=engine.block_size,
    )
    timeline = seen_by_client(timeline, outside_ns)
    kv = None
    if events or kv_trace:
        kv = KvLog(result, engine.block_size, timeline.worker_blocks, events=events, kv_trace=kv_trace)
    described = [
        {
            "scheduling": scheduling_in_words([pool.engine]),
            "engine": pool.engine.described(),
            **({} if plan is None else {"tiers": pool.below().described()}),
        }
        for pool, plan in zip(pools, plans, strict=True)
    ]
    facts = {
        "workers": workers,
        **({} if rank_count == 1 else {"data_parallel_size": rank_count}),
        "routing": _described(routing),
        "seed": seed,
        "load": msgspec.to_builtins(load),
        **(
            described[0]
            if len(pools) == 1
            else {
                "scheduling": scheduling_in_words([pool.engine for pool in pools]),
                "pools": [
                    {"name": pool.name, "workers": pool.workers, **settings}
                    for pool, settings in zip(pools, described, strict=True)
                ],
            }
        ),
        **({} if timing is None else {"timing": type(timing).__qualname__}),
        "times": described_times(pools, timing, result),
        **digests(timeline, kv if events else None),
    }
    decisions = None
    if isinstance(router, KvRouter):
        decisions = router.decisions
        if order is not None:
            decisions = msgspec.structs.replace(decisions, rows=order[decisions.rows])
        facts["router"] = summarise(decisions, timeline, engine.block_size)
    return OfflineRun(timeline, facts, kv, decisions)


def _ends(tell: Callable[[int, int], None]) -> Callable[[int, Engine, bool], None]:
    def on_step(worker: int, engine: Engine, ended: bool) -> None:
        if ended:
            tell(worker, engine.now_ns)

    return on_step


def _described(routing: Routing | KvRouting | Router | NativeRouter) -> Any:
    if isinstance(routing, KvRouting):
        return {"kind": "kv", **msgspec.to_builtins(routing)}
    return routing if isinstance(routing, str) else type(routing).__qualname__


def _require_memory(
    pools: Sequence[WorkerPool], plans: Sequence[TierPlan | None], most_blocks: Sequence[int]
) -> None:
    """Refuse at once what cannot fit, with an estimate. Slots cost as they are used, so a fleet is as large as its
    content; but a policy of the user's is told of every slot.
    """
    what, need = [], 0
    for pool, plan, most in zip(pools, plans, most_blocks, strict=True):
        tiers = () if plan is None else plan.tiers
        need += pool.workers * (WORKER_BYTES + (TIERS_BYTES if tiers else 0))
        own = pool.engine.num_gpu_blocks + sum(
            slots_for(tier.blocks, most) for tier in tiers if not tier.shared
        )
        shared = sum(slots_for(tier.blocks, most) for tier in tiers if tier.shared)
        what.append(
            f"{pool.workers:,} workers of {own:,} blocks" + (f" and {shared:,} shared ones" if shared else "")
        )
        slots = [(pool.workers * pool.engine.num_gpu_blocks, pool.engine.eviction_policy)]
        for tier in tiers:
            holders = 1 if tier.shared else pool.workers
            slots.append((holders * slots_for(tier.blocks, most), tier.eviction))
        for there_are, policy in slots:
            native = policy is None or isinstance(policy, str)
            need += SLOT_BYTES * (slots_for(there_are, most) if native else there_are)
    require_memory(
        ", ".join(what),
        need,
        "fewer workers, or fewer blocks (num_gpu_blocks, and those of the tiers), need less",
    )


def _blocks_of(workload: Workload, engine: VllmConfig) -> int:
    """Blocks that hold every token of the workload, if none is shared."""
    tokens = workload.prompt_tokens.astype(np.int64) + workload.output_tokens
    return int((-(-tokens // engine.block_size)).sum())

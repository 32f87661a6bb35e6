"""Random small fleets with random fault plans, for property tests and the soak."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from understudy import VllmConfig
from understudy.engines.sglang_config import SglangConfig
from understudy.run.autoscale import Autoscale
from understudy.run.chaos import draw_faults, list_kinds
from understudy.run.faults import FaultPlan
from understudy.run.losses import Outcome
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.timeline import Status
from understudy.tiers.settings import TiersConfig
from understudy.workload import Workload

ROUTINGS = ("round_robin", "least_loaded", "session_affinity", "kv", "kv")


@dataclass(frozen=True)
class Case:
    """A fleet, its load and its faults."""

    plan: RunPlan
    faults: FaultPlan


def random_case(seed: int, *, most_requests: int = 40) -> Case:
    """Draw a case: one to four workers, with or without tiers and a scaler, and up to a dozen faults."""
    random = Random(seed)
    workers = random.randint(1, 4)
    routing: Any = random.choice(ROUTINGS)
    tiers = _tiers(random)
    sglang = tiers is None and random.random() < 0.25
    engine: Any = (
        SglangConfig(
            block_size=16, num_gpu_blocks=random.choice((60, 200)), max_num_seqs=random.choice((2, 8))
        )
        if sglang
        else VllmConfig(
            block_size=16,
            num_gpu_blocks=random.choice((40, 200)),
            max_num_seqs=random.choice((2, 8)),
            max_num_batched_tokens=random.choice((64, 256)),
            async_scheduling=random.random() < 0.5,
        )
    )
    workload = _workload(random, random.randint(5, most_requests))
    end_s = float(workload.arrival_ns.max()) / 1e9 + 2.0
    scaler = random.random() < 0.3
    kinds = list_kinds(
        reads_events=routing == "kv",
        has_host_tier=tiers is not None,
        has_limited_host_link=tiers is not None,
        loses_requests=True,
    )
    faults = FaultPlan(
        faults=draw_faults(
            seed,
            per_hour=3600 * random.randint(1, 12) / end_s,
            end_s=end_s,
            workers=workers,
            kinds=kinds,
            mean_duration_s=end_s / 6,
        ),
        on_loss=random.choice(("fail", "retry", "retry", "migrate", "migrate")),
        retry_delay_ms=random.choice((0.0, 0.0, 50.0)),
        max_attempts=random.choice((None, None, 2)),
        drain_limit_s=random.choice((None, 0.0, 0.3)) if scaler else None,
        seed=seed,
    )
    autoscale = None
    if scaler:
        autoscale = Autoscale(
            scaler=f"hpa,metric=kv_use,target={random.choice((0.2, 0.6))},down_window_s=1,interval_s=0.5",
            max_workers=5,
            startup_s=random.choice((0.0, 0.4)),
        )
    plan = RunPlan(
        workload,
        engine,
        workers=workers,
        routing=routing,
        tiers=tiers,
        autoscale=autoscale,
        faults=faults,
        seed=seed,
    )
    return Case(plan, faults)


def check_case(case: Case, **how: Any) -> OfflineRun:
    """Play a case with the core's checks; check that every request has ended once, for a reason."""
    from dataclasses import replace

    made = run_offline(replace(case.plan, check=how.pop("check", True), **how))
    line, policy = made.timeline, case.faults.on_loss
    assert (line.status != Status.UNFINISHED).all()
    done = line.completed
    assert (line.output_tokens[done] == case.plan.workload.output_tokens[done]).all()
    losses = line.losses
    failed = np.flatnonzero(line.status == Status.FAILED)
    if losses is None:
        assert not len(failed)
        return made
    ended = losses.loss_request[losses.loss_outcome == Outcome.FAILED]
    assert sorted(ended.tolist()) == failed.tolist()
    if policy != "migrate":
        assert not (losses.loss_outcome == Outcome.MIGRATED).any()
    if policy == "fail":
        assert (losses.loss_outcome == Outcome.FAILED).all()
    return made


def _tiers(random: Random) -> TiersConfig | None:
    if random.random() < 0.5:
        return None
    link = {"down_gbps": 0.5, "up_gbps": 0.5}
    tiers: list[dict[str, Any]] = [{"tier": "g2", "blocks": random.choice((20, 200)), "link": link}]
    if random.random() < 0.5:
        tiers.append({"tier": "g3", "blocks": 400, "link": link})
    mode = random.choice(("evict", "write_through"))
    return TiersConfig.from_dict({"tiers": tiers, "kv_bytes_per_token": 1000, "offload": {"mode": mode}})


def _workload(random: Random, rows: int) -> Workload:
    """Requests in bursts, of which many share prefixes."""
    at = np.cumsum([random.choice((0.0, 0.0, 0.05, 0.3)) for _ in range(rows)])
    blocks = [random.randint(1, 8) for _ in range(rows)]
    stems = [random.randrange(4) for _ in range(rows)]
    ids = [
        np.array([1000 * stem + i if i < 4 else 10_000 + 100 * row + i for i in range(count)], np.uint32)
        for row, (stem, count) in enumerate(zip(stems, blocks, strict=True))
    ]
    return Workload(
        arrival_ns=np.round(at * 1e9).astype(np.int64),
        prompt_tokens=np.array([16 * count - random.randrange(15) for count in blocks], np.int32),
        output_tokens=np.array([random.choice((1, 4, 40, 120)) for _ in range(rows)], np.int32),
        hash_ids=np.concatenate(ids),
        hash_offsets=np.concatenate(([0], np.cumsum(blocks))).astype(np.int64),
        trace_block_size=16,
    )

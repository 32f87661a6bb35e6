"""Runs of small workloads with tiers, and what to compare of them."""

from __future__ import annotations

import hashlib
from random import Random
from typing import TYPE_CHECKING, Any

from model.replay_gen import REQUEST_COLUMNS
from replay.building import single_turns
from tiers.building import INF, way
from understudy import _core

if TYPE_CHECKING:
    from understudy.workload import Workload

COLUMNS = tuple(name for name in REQUEST_COLUMNS if name != "worker")
TIER_COLUMNS = ("parked_ns", "room_wait_ns")


def crowd_of(
    seed: int, requests: int = 40, groups: int = 4, block: int = 4, burst: int = 1, most_outputs: int = 12
) -> Workload:
    """Requests that share beginnings, `burst` of them at a time."""
    rng = Random(f"crowd {seed}")
    stems = [[rng.randrange(1 << 20) for _ in range(rng.randrange(1, 7))] for _ in range(groups)]
    prompts, outputs, arrivals, content, now_ms = [], [], [], [], 0
    for number in range(requests):
        if number % burst == 0:
            now_ms += rng.randrange(12)
        stem = rng.choice(stems)
        own = [(1 << 21) + 8 * number + i for i in range(rng.randrange(1, 3))]
        content.append(stem[: rng.randrange(len(stem) + 1)] + own)
        prompts.append(len(content[-1]) * block - rng.randrange(block))
        outputs.append(rng.randrange(1, most_outputs + 1))
        arrivals.append(now_ms)
    return single_turns(prompts, outputs, arrivals, content, trace_block_size=block)


def play(workload: Workload, config: _core.TierConfig | None, **how: Any) -> _core.FleetResult:
    """Replay with every invariant checked after every step, unless told otherwise."""
    fleet = {"routing", "seed", "concurrency", "threads", "fast_forward", "check", "on_step"}
    given: dict[str, Any] = {"check": True, **{name: value for name, value in how.items() if name in fleet}}
    engine = {"block_size": 4, "num_gpu_blocks": 24} | {k: v for k, v in how.items() if k not in fleet}
    timing = engine.pop("timing", None) or _core.constant_timing(1.0, 1.0)
    workers = engine.pop("workers", 1)
    pool = _core.Pool(engine=_core.VllmEngineConfig(**engine), timing=timing, workers=workers, tiers=config)
    on_step = given.pop("on_step", None)
    return _core.run_fleet(
        workload, _core.FleetSettings(**{"pools": [pool], "routing": "round_robin"} | given), on_step=on_step
    )


def per_request(result: _core.FleetResult, tiers: bool = True) -> dict[str, list[int]]:
    """Everything about each request but the number of its worker."""
    columns = {name: getattr(result, name).tolist() for name in COLUMNS}
    if tiers and result.tiers:
        columns |= {name: getattr(result, name).tolist() for name in TIER_COLUMNS}
        for name in ("below_tokens_first", "below_tokens_total"):
            columns |= {f"{name} {i}": column.tolist() for i, column in enumerate(getattr(result, name))}
    return columns


def digest(result: _core.FleetResult) -> str:
    """Of everything that a run yields."""
    totals = result.tier_totals
    rest = [
        result.steps,
        result.worker.tolist(),
        result.onboard_ns.tolist(),
        [(t.tier, t.resident_blocks, t.stored_blocks, t.evicted_blocks) for t in result.tiers],
        [getattr(totals, name) for name in dir(totals) if not name.startswith("_")],
        [(link.name, link.transfers_started, link.bytes_finished) for link in result.links],
        [getattr(result, name).tolist() for name in dir(result) if name.startswith("sample_")],
    ]
    return hashlib.sha256(repr((per_request(result), rest)).encode()).hexdigest()


def drained(result: _core.FleetResult) -> None:
    """Every request ended, and every byte that a link began to carry has arrived."""
    assert (result.finish_ns >= 0).all()
    for link in result.links:
        assert link.bytes_started == link.bytes_finished
        assert link.transfers_started == link.transfers_finished


def random_tiers(rng: Random, through: bool) -> dict[str, Any]:
    """Settings of tiers so small that everything happens."""
    return {
        "g2_blocks": rng.choice([4, 12, 100]),
        "host": way(
            rng.choice([0.1, 1.0, 10.0, INF]),
            rng.choice([0.3, 1.0, INF]),
            down_fixed_ns=rng.choice([0, 0, 1000, 700_000]),
            duplex_gbps=rng.choice([0.3, INF, INF]),
        ),
        "demand_first": rng.random() < 0.3,
        "offload_batch_size": rng.choice([1, 4]),
        "offload_concurrency": rng.choice([1, 2]),
        "write_through": through,
        "exclusive": not through and rng.random() < 0.4,
        "recompute_fallback": rng.random() < 0.3,
        "onboard_failure_rate": rng.choice([0, 0, 0.3]),
    }

"""Prefill and decode workers with tiers below the device."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from replay.test_disaggregation import BYTES, make_workload
from understudy.engines.vllm_config import VllmConfig
from understudy.report.report import Report
from understudy.run.disaggregation import Disaggregation
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.pools import WorkerPool
from understudy.run.run_plan import RunPlan
from understudy.run.step_columns import EventKind
from understudy.tiers.settings import TiersConfig
from understudy.workload.mooncake import read_mooncake

if TYPE_CHECKING:
    from understudy.workload import Workload


def engine_of(blocks: int, *, asynchronous: bool) -> VllmConfig:
    return VllmConfig(
        block_size=16,
        num_gpu_blocks=blocks,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        async_scheduling=asynchronous,
    )


def tiers_of(
    blocks: int, gbps: float = 1.0, mode: str = "write_through", *, disk: bool = False
) -> TiersConfig:
    links = {"down_gbps": gbps, "up_gbps": gbps}
    below = [{"tier": "g2", "blocks": blocks, "link": links}]
    if disk:
        below.append({"tier": "g3", "blocks": 4 * blocks, "link": links})
    return TiersConfig.from_dict({"tiers": below, "offload": {"mode": mode}, "kv_bytes_per_token": BYTES})


def run(workload: Workload, engine: VllmConfig, tiers: TiersConfig | None, **how: Any) -> OfflineRun:
    pools = (
        WorkerPool(name="prefill", role="prefill", workers=2, engine=engine, tiers=tiers),
        WorkerPool(name="decode", role="decode", workers=2, engine=engine),
    )
    split = Disaggregation(kv_bytes_per_token=BYTES, link_gbps=how.pop("link_gbps", 0.01))
    return run_offline(RunPlan(workload, pools=pools, disaggregation=split, **how))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_tier_that_is_never_read_changes_nothing(tmp_path: Any, seed: int, asynchronous: bool) -> None:
    workload = make_workload(tmp_path, seed, gap_ms=20.0)
    engine = engine_of(4000, asynchronous=asynchronous)
    with_tier = run(workload, engine, tiers_of(4000), check=True)
    without = run(workload, engine, None)
    names = ("first_token_ns", "last_token_ns", "finish_ns", "cached_tokens_first")
    for name in names:
        assert (getattr(with_tier.timeline, name) == getattr(without.timeline, name)).all(), name
    first, second = with_tier.timeline.handoff, without.timeline.handoff
    assert first is not None
    assert second is not None
    assert (first.landed_ns == second.landed_ns).all()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_small_prefill_workers_read_prompts_back_from_tiers(
    tmp_path: Any, seed: int, asynchronous: bool
) -> None:
    draw = random.Random(seed)
    workload = repeated(tmp_path, seed)
    engine = engine_of(draw.choice([30, 60]), asynchronous=asynchronous)
    tiers = tiers_of(
        draw.choice([100, 400]),
        draw.choice([10.0, 0.005]),
        draw.choice(["write_through", "evict"]),
        disk=draw.random() < 0.5,
    )
    found = run(workload, engine, tiers, check=True, link_gbps=draw.choice([0.1, 0.001]))
    assert found.timeline.completed.all()
    assert (found.timeline.output_tokens == workload.output_tokens).all()
    again = run(workload, engine, tiers, link_gbps=0.1)
    assert again.timeline.completed.all()


def repeated(tmp_path: Any, seed: int) -> Workload:
    """Prompts of which many are sent again later."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(10**6) for _ in range(draw.randint(2, 12))] for _ in range(12)]
    lines = []
    for number in range(80):
        ids = draw.choice(prompts)
        lines.append(
            f'{{"timestamp": {number * 12}, "input_length": {len(ids) * 16}, "output_length": {draw.randint(1, 20)}, '
            f'"hash_ids": {ids}}}'
        )
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_mooncake(path, trace_block_size=16)


def test_a_host_tier_saves_prompt_tokens_of_prefill_workers(tmp_path: Any) -> None:
    workload, engine = repeated(tmp_path, 1), engine_of(40, asynchronous=False)
    with_tier = run(workload, engine, tiers_of(2000, 100.0))
    without = run(workload, engine, None)
    saved = with_tier.timeline.cached_tokens_first.sum() - without.timeline.cached_tokens_first.sum()
    assert saved > 1000
    report = Report.build(with_tier.timeline, with_tier.facts)
    assert report.tiers is not None
    hits = {use.tier: use.hit_tokens_first for use in report.tiers.tiers}
    assert hits["prefill g2"] > 1000
    assert sum(hits.values()) == with_tier.timeline.cached_tokens_first.sum()


def test_decode_workers_read_prompts_that_they_compute_from_their_tiers(tmp_path: Any) -> None:
    workload, engine = repeated(tmp_path, 2), engine_of(40, asynchronous=False)

    def run_local(tiers: TiersConfig | None) -> OfflineRun:
        pools = (
            WorkerPool(name="prefill", role="prefill", workers=1, engine=engine),
            WorkerPool(name="decode", role="decode", workers=1, engine=engine, tiers=tiers),
        )
        split = Disaggregation(kv_bytes_per_token=BYTES, rule="llm-d:0")  # never remote
        return run_offline(RunPlan(workload, pools=pools, disaggregation=split, check=True))

    with_tier, without = run_local(tiers_of(2000, 100.0)), run_local(None)
    assert with_tier.timeline.completed.all()
    saved = with_tier.timeline.cached_tokens_first.sum() - without.timeline.cached_tokens_first.sum()
    assert saved > 1000


@pytest.mark.parametrize("seed", range(6))
def test_tiers_below_both_pools_lose_no_block(tmp_path: Any, seed: int) -> None:
    draw = random.Random(seed)
    engine = engine_of(draw.choice([20, 60]), asynchronous=draw.random() < 0.5)
    tiers = tiers_of(draw.choice([20, 400]), draw.choice([10.0, 0.005, 0.0005]), disk=draw.random() < 0.5)
    split = Disaggregation(
        prefill_workers=2,
        decode_workers=2,
        kv_bytes_per_token=BYTES,
        link_gbps=draw.choice([0.1, 0.001]),
        rule=draw.choice(["always", "uncached:100", "ratio:0.9"]),
    )
    found = run_offline(
        RunPlan(repeated(tmp_path, seed), engine, tiers=tiers, disaggregation=split, check=True)
    )
    assert found.timeline.completed.all()
    report = Report.build(found.timeline, found.facts)
    assert report.tiers is not None
    assert report.handoff is not None
    assert "hand-off" not in " ".join(link.name for link in report.tiers.links)
    report.to_html(tmp_path / "report.html")
    report.to_json(tmp_path / "report.json")


@pytest.mark.parametrize("tiers", [None, tiers_of(2000, 100.0)], ids=["device", "host"])
@pytest.mark.parametrize("seed", range(3))
def test_lookups_and_hits_count_every_admission_of_both_workers(
    tmp_path: Any, seed: int, tiers: TiersConfig | None
) -> None:
    """Except for the first of the decode worker, which finds what it pulled."""
    workload = repeated(tmp_path, seed)
    engine = VllmConfig(
        block_size=16,
        num_gpu_blocks=20,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        long_prefill_token_threshold=32,
        async_scheduling=False,
    )
    found = run(workload, engine, tiers, check=True, keep_steps=True)
    timeline, steps = found.timeline, found.steps
    assert steps is not None
    prefills, resumed = steps.event_worker < 2, steps.event_kind == EventKind.RESUMED
    assert (prefills & resumed).any()
    counted = resumed | (prefills & (steps.event_kind == EventKind.ADMITTED))
    hits = np.zeros(len(workload), np.int64)
    np.add.at(hits, steps.event_request[counted], steps.event_cached[counted])
    assert timeline.cached_tokens_total.tolist() == hits.tolist()
    lookups = np.bincount(steps.event_request[counted], minlength=len(workload))
    assert (timeline.looked_up_tokens >= lookups * workload.prompt_tokens).all()

"""Prefill and decode workers that also offload to their hosts as vLLM does."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from replay.test_disaggregation import BYTES
from replay.test_handoff_tiers import engine_of, repeated
from understudy.report.report import Report
from understudy.run.disaggregation import Disaggregation
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from understudy.engines.vllm_config import VllmConfig
    from understudy.workload import Workload


def host_of(blocks: int, gbps: float) -> TiersConfig:
    links = {"down_gbps": gbps, "up_gbps": gbps}
    return TiersConfig.from_dict(
        {
            "tiers": [{"tier": "g2", "blocks": blocks, "link": links}],
            "offload": {"mode": "vllm"},
            "kv_bytes_per_token": BYTES,
        }
    )


def run(
    workload: Workload, engine: VllmConfig, host: TiersConfig | None, gbps: float, **how: Any
) -> OfflineRun:
    split = Disaggregation(
        prefill_workers=2,
        decode_workers=2,
        kv_bytes_per_token=BYTES,
        link_gbps=gbps,
        rule=how.pop("rule", "always"),
    )
    return run_offline(RunPlan(workload, engine, tiers=host, disaggregation=split, **how))


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_fast_forwarding_gives_what_single_steps_give(tmp_path: Any, seed: int, asynchronous: bool) -> None:
    draw = random.Random(seed)
    workload = repeated(tmp_path, seed)
    engine = engine_of(draw.choice([24, 60]), asynchronous=asynchronous)
    host = host_of(draw.choice([20, 400]), draw.choice([10.0, 0.01, 0.001]))
    how: dict[str, Any] = {"rule": draw.choice(["always", "uncached:100"])}
    gbps = draw.choice([0.1, 0.001])
    fast = run(workload, engine, host, gbps, check=True, **how).timeline
    stepped = run(workload, engine, host, gbps, fast_forward=False, **how).timeline
    assert fast.completed.all()
    assert (fast.output_tokens == workload.output_tokens).all()
    for name in ("first_token_ns", "last_token_ns", "finish_ns", "cached_tokens_first"):
        assert (getattr(fast, name) == getattr(stepped, name)).all(), name


def test_prompts_come_back_from_the_hosts_of_prefill_workers(tmp_path: Any) -> None:
    workload, engine = repeated(tmp_path, 1), engine_of(40, asynchronous=False)
    with_host = run(workload, engine, host_of(2000, 100.0), 0.1)
    without = run(workload, engine, None, 0.1)
    assert with_host.timeline.cached_tokens_first.sum() > without.timeline.cached_tokens_first.sum() + 500
    report = Report.build(with_host.timeline, with_host.facts)
    assert report.tiers is not None
    assert report.handoff is not None

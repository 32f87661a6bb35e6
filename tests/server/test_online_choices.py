"""A workload played over HTTP gives what the offline replay of its arrival times gives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from replay.building import single_turns
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.speculation import SpeculativeConfig
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.online.replay import run_online
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.timeline import Status, Timeline

if TYPE_CHECKING:
    from understudy.workload import Workload

TIMING = Constant(prefill_ms=5.0, decode_ms=5.0)


def both(workload: Workload, engine: VllmConfig | SglangConfig, **how: Any) -> tuple[Timeline, Timeline]:
    """The live run, and the offline run of its arrival times."""
    live = run_online(workload, engine, clock_speed=3, **how).timeline
    return live, run_offline(RunPlan(replace(workload, arrival_ns=live.arrival_ns), engine, **how)).timeline


def require_equal(live: Timeline, offline: Timeline) -> None:
    start = live.arrival_ns.min()
    for name in ("first_token_ns", "finish_ns"):
        here, there = getattr(live, name), getattr(offline, name)
        assert np.where(here < 0, -1, here - start).tolist() == there.tolist(), name
    for name in ("status", "finish_reason", "output_tokens", "worker"):
        assert getattr(live, name).tolist() == getattr(offline, name).tolist(), name
    assert live.steps == offline.steps


@pytest.mark.parametrize("workers", [1, 3])
def test_every_worker_draws_its_own_drafts(workers: int) -> None:
    speculative = SpeculativeConfig(
        method="eagle", num_speculative_tokens=3, accept_rates=(0.6, 0.5, 0.4), seed=7
    )
    engine = VllmConfig(block_size=16, num_gpu_blocks=500, timing=TIMING, speculative_config=speculative)
    workload = single_turns([32] * 6, 40, arrival_ms=[60 * row for row in range(6)])
    live, offline = both(workload, engine, workers=workers)
    require_equal(live, offline)
    durations = (live.finish_ns - live.first_token_ns).tolist()
    assert len(set(durations)) > 1


def test_a_full_queue_cancels_a_request_and_the_run_goes_on() -> None:
    engine = SglangConfig(
        block_size=16,
        num_gpu_blocks=100,
        max_num_seqs=1,
        max_queued_requests=1,
        timing=Constant(prefill_ms=100.0, decode_ms=5.0),
    )
    live, offline = both(single_turns([32] * 6, 20, arrival_ms=range(6)), engine)
    require_equal(live, offline)
    assert (live.status == Status.CANCELLED).sum() >= 3


@pytest.mark.parametrize("policy", ["lof", "fcfs"])
def test_requests_are_ordered_by_the_limit_of_their_outputs(policy: str) -> None:
    engine = SglangConfig(
        block_size=16,
        num_gpu_blocks=100,
        max_num_seqs=1,
        schedule_policy=policy,  # type: ignore[arg-type]
        timing=TIMING,
    )
    workload = single_turns([16] * 3, [40, 5, 2], arrival_ms=[0, 20, 40], max_tokens=[40, 5, 30])
    live, offline = both(workload, engine)
    require_equal(live, offline)
    last = int(np.argmax(live.finish_ns))
    assert last == (1 if policy == "lof" else 2)


def test_a_limit_far_above_the_output_defers_admissions() -> None:
    engine = SglangConfig(block_size=16, num_gpu_blocks=20, timing=TIMING)
    workload = single_turns([64] * 4, [6] * 4, arrival_ms=[0, 20, 40, 60], max_tokens=[200] * 4)
    live, offline = both(workload, engine)
    require_equal(live, offline)

"""Clients that abort requests in a replay of workers without roles."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from replay.test_disaggregation import SMALL, SYNC, make_workload
from understudy.cli import main
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.report.report import Report
from understudy.router.kv import KvRouting
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.timeline import Status
from understudy.tiers.settings import TiersConfig
from understudy.workload import ClosedLoop, Workload

MS = 1_000_000


def with_aborts(workload: Workload, seed: int, chance: float = 0.5, longest_ms: int = 2000) -> Workload:
    draw = random.Random(seed)
    times = [draw.randrange(longest_ms * MS) if draw.random() < chance else -1 for _ in range(len(workload))]
    return replace(workload, abort_after_ns=np.array(times, np.int64))


@pytest.mark.parametrize("engine", [SYNC, SMALL, SglangConfig(block_size=16, num_gpu_blocks=400)], ids=str)
@pytest.mark.parametrize("routing", ["round_robin", "kv", "least_loaded"])
@pytest.mark.parametrize("seed", range(3))
def test_fast_forward_equals_stepping_with_aborts(
    tmp_path: Any, seed: int, routing: Any, engine: Any
) -> None:
    workload = with_aborts(make_workload(tmp_path, seed, gap_ms=10.0), seed)
    first = run_offline(RunPlan(workload, engine, workers=2, routing=routing, check=True))
    second = run_offline(RunPlan(workload, engine, workers=2, routing=routing, fast_forward=False))
    assert first.facts.digests == second.facts.digests
    assert set(first.timeline.status.tolist()) == {Status.COMPLETED, Status.CANCELLED}


def test_an_abort_ends_a_request_at_its_time_and_keeps_its_tokens(tmp_path: Any) -> None:
    workload = with_aborts(make_workload(tmp_path, 1), 1)
    found = run_offline(RunPlan(workload, SYNC, check=True))
    timeline, after_ns = found.timeline, workload.abort_after_ns
    assert after_ns is not None
    cut = timeline.status == Status.CANCELLED
    assert cut.any()
    assert (timeline.finish_ns[cut] == (timeline.arrival_ns + after_ns)[cut]).all()
    assert (timeline.output_tokens[cut] < workload.output_tokens[cut]).all()
    assert (timeline.output_tokens[~cut] == workload.output_tokens[~cut]).all()
    late = ~cut & (after_ns >= 0)
    assert (timeline.finish_ns[late] <= (timeline.arrival_ns + after_ns)[late]).all()
    report = Report.build(timeline, found.facts)
    assert report.requests.cancelled == cut.sum()


def test_an_abort_that_comes_too_late_changes_nothing(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 2)
    late = replace(workload, abort_after_ns=np.full(len(workload), 2**62))
    absent = replace(workload, abort_after_ns=np.full(len(workload), -1))
    digest = run_offline(RunPlan(workload, SMALL, workers=2)).facts.digest
    assert run_offline(RunPlan(late, SMALL, workers=2)).facts.digest == digest
    assert run_offline(RunPlan(absent, SMALL, workers=2, threads=2)).facts.digest == digest


def test_an_abort_at_arrival_computes_nothing(tmp_path: Any) -> None:
    workload = make_workload(tmp_path, 3)
    timeline = run_offline(
        RunPlan(replace(workload, abort_after_ns=np.zeros(len(workload), np.int64)), SYNC)
    ).timeline
    assert (timeline.status == Status.CANCELLED).all()
    assert timeline.steps == 0


def test_a_request_is_aborted_in_the_queue_of_a_router(tmp_path: Any) -> None:
    workload = with_aborts(make_workload(tmp_path, 4, requests=60, gap_ms=1.0), 4, longest_ms=400)
    engine = VllmConfig(block_size=16, num_gpu_blocks=400, max_num_batched_tokens=64, max_num_seqs=4)
    timeline = run_offline(
        RunPlan(workload, engine, workers=2, routing=KvRouting(queue_threshold=0.5), check=True)
    ).timeline
    assert (timeline.status != Status.UNFINISHED).all()
    assert (timeline.worker[timeline.status == Status.CANCELLED] == -1).any()


def test_aborts_work_with_closed_loops_and_tiers(tmp_path: Any) -> None:
    links = {"down_gbps": 0.005, "up_gbps": 0.005}
    tiers = TiersConfig.from_dict(
        {"tiers": [{"tier": "g2", "blocks": 100, "link": links}], "kv_bytes_per_token": 1000}
    )
    engine = VllmConfig(block_size=16, num_gpu_blocks=40, max_num_batched_tokens=64, max_num_seqs=4)
    workload = with_aborts(make_workload(tmp_path, 5, requests=60), 5)
    how: dict[str, Any] = {"workers": 2, "tiers": tiers, "load": ClosedLoop(8)}
    first = run_offline(RunPlan(workload, engine, check=True, **how))
    second = run_offline(RunPlan(workload, engine, fast_forward=False, **how))
    assert first.facts.digests == second.facts.digests
    assert (first.timeline.status == Status.CANCELLED).any()


def test_threads_are_refused_with_aborts(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="no aborts"):
        run_offline(RunPlan(with_aborts(make_workload(tmp_path, 1), 1), SYNC, workers=2, threads=2))


def test_runs_that_cannot_abort_refuse_such_a_trace(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "output_length": 4, "hash_ids": [1], "abort_after_ms": 5}\n')
    assert main(["replay", str(path), "--online", "--quiet"]) == 2
    assert "abort_after_ms: --online does not abort requests" in capsys.readouterr().err

"""Goodput per GPU-hour and recovery of a fleet that changes, as its requests and its workers' states say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from answers.elastic_audit import recompute
from elastic.burst import ENGINE, burst
from understudy.api import replay
from understudy.report import Slo
from understudy.report.requests import write_requests
from understudy.run.autoscale import Autoscale
from understudy.run.faults import FaultPlan, parse_fault
from understudy.run.worker_lives import Life

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("scaler", "faults"),
    [
        ("dynamo-load", ()),
        ("backlog", ()),
        ("hpa,metric=kv_use,target=0.7", ()),
        ("wva", ("kill:0@50s+30s", "kill:1@110s")),
    ],
)
def test_the_report_says_what_requests_and_workers_show(
    scaler: str, faults: tuple[str, ...], tmp_path: Path
) -> None:
    plan = FaultPlan(faults=tuple(parse_fault(text) for text in faults)) if faults else None
    autoscale = Autoscale(scaler=scaler, startup_s=20)
    report = replay(burst(), ENGINE, autoscale=autoscale, slo=Slo(ttft_ms=2000), faults=plan)
    write_requests(report, tmp_path / "requests.jsonl")
    lines = [msgspec.json.decode(line) for line in (tmp_path / "requests.jsonl").read_bytes().splitlines()]
    lives = report.columns.lives
    assert lives is not None
    changes = [
        (at / 1e9, worker, Life(state).name.lower())
        for at, worker, state in zip(
            lives.life_ns.tolist(), lives.life_worker.tolist(), lives.life_state.tolist(), strict=True
        )
    ]
    found = recompute(lines, changes, report.columns.end_ns / 1e9, good_ttft_ms=2000)
    use = report.fleet_use
    assert use is not None
    assert use.gpu_hours == pytest.approx(found.gpu_hours)
    assert use.good_per_gpu_hour == pytest.approx(found.good_per_gpu_hour)
    assert found.recovery_s is not None
    # The report sees queues at the ends of steps, a request's line when it arrived.
    assert use.recovery_s == pytest.approx(found.recovery_s, abs=1.5)

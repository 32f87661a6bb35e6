"""What the report says of a fleet that changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic.burst import ENGINE, burst, run_burst, workload_of
from elastic.steps import Steps
from understudy.api import replay
from understudy.report import Report, Slo
from understudy.run.autoscale import Autoscale


def report_of(scaler: Any, **how: Any) -> Report:
    autoscale = Autoscale(scaler=scaler, startup_s=how.pop("startup_s", 20), price_per_gpu_hour=3.0)
    return replay(burst(), ENGINE, autoscale=autoscale, slo=Slo(ttft_ms=2000), **how)


def test_the_planner_is_late_on_the_burst_and_the_report_says_by_how_much() -> None:
    report = report_of("dynamo-load")
    use = report.fleet_use
    assert use is not None
    assert use.gpu_hours * 3600 == pytest.approx(667, rel=0.01)
    assert use.cost == pytest.approx(use.gpu_hours * 3)
    assert (use.started, use.stopped, use.ready_max) == (5, 5, 6)
    seen = use.longest_queue
    assert seen is not None
    assert seen.last_ready_s == 155.0
    assert seen.fall_s == 90.0
    assert [verdict.rule for verdict in report.verdicts] == ["scaler_late"]
    assert "65 s after arrivals had fallen to half" in report.verdicts[0].finding


def test_our_own_scaler_beats_the_planner_on_both_axes() -> None:
    planner, own = report_of("dynamo-load"), report_of("backlog")
    assert planner.fleet_use is not None
    assert own.fleet_use is not None
    assert own.ttft_ms.mean < min(0.5 * planner.ttft_ms.mean, 16_000)
    assert own.fleet_use.gpu_hours < min(planner.fleet_use.gpu_hours, 667 / 3600)
    assert own.fleet_use.good_per_gpu_hour > planner.fleet_use.good_per_gpu_hour


def test_draining_in_a_queue_is_named() -> None:
    steps = [(10_000.0, None, 2), (70_000.0, None, 1), (100_000.0, None, 3)]
    report = report_of(Steps(steps), startup_s=0)
    assert report.fleet_use is not None
    assert report.fleet_use.drains_while_queueing == 1
    assert "scaler_drains_in_queue" in [verdict.rule for verdict in report.verdicts]


def test_flapping_is_named() -> None:
    steps = [(10_000.0 * i, None, 1 + i % 2) for i in range(1, 9)]
    report = report_of(Steps(steps), startup_s=0)
    assert report.fleet_use is not None
    assert report.fleet_use.flaps == 7
    assert "scaler_flaps" in [verdict.rule for verdict in report.verdicts]


def test_a_calm_fleet_has_no_verdict_and_its_numbers_are_in_the_outputs() -> None:
    workload = workload_of([float(i) for i in range(60)])
    report = replay(workload, ENGINE, autoscale=Autoscale(scaler=Steps([(10_000.0, None, 2)])))
    assert not report.verdicts
    assert report.fleet_use is not None
    assert report.fleet_use.longest_queue is None
    whole_s = report.columns.end_ns / 1e9
    assert report.fleet_use.gpu_hours * 3600 == pytest.approx(2 * whole_s - 10)
    written = json.loads(report.to_json())
    assert written["fleet_use"]["started"] == 1
    assert "fleet_use.gpu_hours" in written["definitions"]


def test_a_fixed_fleet_has_no_such_part() -> None:
    report = replay(workload_of([0.0, 1.0]), ENGINE)
    assert report.fleet_use is None
    assert "fleet_use" not in json.loads(report.to_json())


def test_a_faster_start_takes_the_planner_less_time() -> None:
    slow, fast = run_burst("dynamo-load"), report_of("dynamo-load", startup_s=1)
    assert fast.ttft_ms.mean < 0.7 * (slow.timeline.first_token_ns - slow.timeline.arrival_ns).mean() / 1e6

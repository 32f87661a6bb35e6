"""What the report of a run with faults says, and the flags that give them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from elastic.burst import ENGINE, burst, workload_of
from understudy import replay
from understudy.cli import main
from understudy.report.fault_report import describe_faults
from understudy.run.autoscale import Autoscale
from understudy.run.faults import FaultPlan, parse_fault

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from understudy.report import Report


def report_of(*faults: str, **policy: Any) -> Report:
    workload = workload_of([i / 10 for i in range(60)], prompt=200, answer=60)
    plan = FaultPlan(faults=tuple(map(parse_fault, faults)), **policy)
    return replay(workload, ENGINE, workers=2, faults=plan)


def test_each_fault_has_the_requests_that_it_hurt_and_how() -> None:
    report = report_of("kill:1@2s+1s", "slow:0@1s+1s", "kill:0@100s+1s", on_loss="migrate")
    made = report.fault_report
    assert made is not None
    kill, slow, late = made.faults
    assert (kill.began_s, kill.ended_s) == (2.0, 3.0)
    assert kill.migrated + kill.retried == made.lost > 0
    assert kill.recovered_s is not None
    assert kill.recovered_s > 0
    assert (slow.migrated, slow.retried, slow.failed, slow.recovered_s) == (0, 0, 0, None)
    assert slow.in_flight > 0
    assert (late.began_s, late.in_flight) == (None, 0)
    text = describe_faults(made)
    assert "2 of 3 took effect" in text
    assert f"kill:1@2s+1s: {made.lost} requests lost a worker" in text
    written = json.loads(report.to_json())
    assert written["fault_report"]["faults"][0]["fault"] == "kill:1@2s+1s"
    assert "fault_report.lost" in written["definitions"]
    assert written["run"]["faults"]["on_loss"] == "migrate"


def test_tokens_of_requests_that_fail_are_in_vain() -> None:
    failed, moved = report_of("kill:1@2s+1s", on_loss="fail"), report_of("kill:1@2s+1s", on_loss="migrate")
    assert failed.fault_report is not None
    assert moved.fault_report is not None
    assert failed.fault_report.failed == failed.requests.failed > 0
    assert failed.fault_report.lost_tokens > moved.fault_report.lost_tokens


def test_a_run_without_faults_has_no_report_of_them() -> None:
    assert replay(workload_of([0.0, 1.0]), ENGINE).fault_report is None


def test_faults_of_a_fleet_without_a_scaler_cost_nothing_in_its_report() -> None:
    assert report_of("kill:1@2s+1s").fleet_use is None


def test_recovery_is_measured_from_the_load_step() -> None:
    def recovery(scaler: str) -> float:
        use = replay(
            burst(), ENGINE, autoscale=Autoscale(scaler=scaler, startup_s=20, max_workers=8)
        ).fleet_use
        assert use is not None
        assert use.recovery_s is not None
        return use.recovery_s

    assert 20 < recovery("backlog") < recovery("dynamo-load") < 200


def test_the_command_line_reads_plans_and_draws_chaos(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = (
        {"timestamp": i * 100, "input_length": 200, "output_length": 60, "hash_ids": [i]} for i in range(60)
    )
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    plan = tmp_path / "faults.txt"
    plan.write_text("slow:0@1s+2s,factor=3\n", encoding="utf-8")
    base = ["replay", str(trace), "--workers", "2", "--routing", "kv", "--quiet"]
    given = [*base, "--faults", str(plan), "--fault", "kill:1@2s+1s", "--on-loss", "migrate"]
    out = tmp_path / "report.json"
    assert main([*given, "--json", str(out)]) == 0
    assert json.loads(out.read_text())["run"]["faults"]["faults"] == ["slow:0@1s+2s,factor=3", "kill:1@2s+1s"]
    digests = set()
    for _ in range(2):
        assert main([*base, "--chaos", "7", "--chaos-rate", "3600", "--check", "--json", str(out)]) == 0
        written = json.loads(out.read_text())
        digests.add(written["run"]["digest"])
        assert len(written["run"]["faults"]["faults"]) > 1
    assert len(digests) == 1
    capsys.readouterr()
    for wrong, why in (
        (["--chaos-rate", "5"], "--chaos-rate has no effect without --chaos"),
        (["--on-loss", "fail"], "--on-loss has no effect without"),
        (["--drain-limit-s", "5"], "--drain-limit-s has no effect without --autoscale"),
        (["--chaos", "1", "--chaos-kinds", "fire"], "fire is not a fault"),
        (["--fault", "kill"], "--fault: 'kill' is not KIND"),
    ):
        assert main([*base, *wrong]) == 2
        assert why in capsys.readouterr().err

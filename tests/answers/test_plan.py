"""The bill, the commands, the manifest and the latencies of a plan are those that auditors recompute."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from answers.bill import count_manifest
from answers.engine_commands import read_engine
from understudy.cli import main

if TYPE_CHECKING:
    from pathlib import Path

TRACE = "examples/demo_trace.jsonl"
QUESTIONS = {
    "dense": ("Llama-3.1-8B", "H100,L40S", "250", "12", "4"),
    "experts": ("Qwen3-30B-A3B", "H200", "250", "20", "6"),
}


def make_plan(folder: Path, name: str) -> dict[str, Any]:
    model, gpus, ttft_ms, tpot_ms, users = QUESTIONS[name]
    words = [
        "plan",
        TRACE,
        "--model",
        model,
        "--gpu",
        gpus,
        "--slo-ttft-ms",
        ttft_ms,
        "--slo-tpot-ms",
        tpot_ms,
    ]
    words += [
        "--users",
        users,
        "--goal",
        "0.9",
        "--most-gpus",
        "8",
        "--node-gpus",
        "4",
        "--jobs",
        "1",
        "--quiet",
        "--out",
        str(folder),
    ]
    assert main([*words, "--most-cpu-s", "1", "--no-splits"]) == 0
    plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    assert plan["answer"] is not None
    return plan


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_bill_of_a_plan_is_that_of_its_commands_and_a_replay(name: str, tmp_path: Path) -> None:
    plan = make_plan(tmp_path, name)
    answer = plan["answer"]
    gpus = answer["gpus"]
    assert count_manifest((tmp_path / "fleet.yaml").read_text()) == gpus
    script = (tmp_path / "commands.sh").read_text().splitlines()
    (engine,) = [read_engine(shlex.split(line)) for line in script if line.startswith("vllm serve")]
    assert engine.gpus * answer["engines"] == gpus
    price = plan["prices"][answer["flags"]["gpu"]]
    assert answer["cost_per_hour"] == pytest.approx(price * gpus)
    assert answer["cost_per_month"] == pytest.approx(price * gpus * 730)

    report = replay(tmp_path, name, plan)
    hours = report["duration_s"] / 3600
    tokens = sum(report["tokens"][kind] for kind in ("prompt", "output"))
    assert answer["cost_per_million_tokens"] == pytest.approx(price * gpus * hours / tokens * 1e6, rel=1e-6)
    output = report["tokens"]["output"]
    assert answer["cost_per_million_output_tokens"] == pytest.approx(
        price * gpus * hours / output * 1e6, rel=1e-6
    )
    assert answer["in_time"] == pytest.approx(report["goodput"]["ratio"])
    assert answer["summary"]["ttft_ms"]["p99"] == pytest.approx(report["ttft_ms"]["p99"])
    assert answer["summary"]["itl_ms"]["p99"] == pytest.approx(report["tpot_ms"]["p99"])


def replay(folder: Path, name: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Replay the answer with the flags that the plan prints, and sum the tokens of its requests."""
    model, _, ttft_ms, tpot_ms, users = QUESTIONS[name]
    words = [
        "replay",
        TRACE,
        "--model",
        model,
        "--users",
        users,
        "--slo-ttft-ms",
        ttft_ms,
        "--slo-itl-ms",
        tpot_ms,
    ]
    for flag, value in plan["answer"]["flags"].items():
        words += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    rows = folder / "requests.jsonl"
    path = folder / "report.json"
    assert main([*words, "--no-advice", "--json", str(path), "--requests-jsonl", str(rows)]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    requests = [json.loads(line) for line in rows.read_text().splitlines()]
    report["tokens"] = {
        "prompt": sum(row["prompt_tokens"] for row in requests if row["status"] == "completed"),
        "output": sum(row["output_tokens"] for row in requests if row["status"] == "completed"),
    }
    return report

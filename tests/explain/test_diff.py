"""Differences of two saved runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import pytest

from explain.random_runs import record
from replay.building import conversations, crowd, single_turns
from understudy.cli import main
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument
from understudy.explain.diff import compare_runs, find_first_difference
from understudy.router.kv import KvRouting

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = VllmConfig(
    block_size=16, num_gpu_blocks=64, timing=Constant(prefill_ms=10.0, decode_ms=1.0), async_scheduling=False
)


def test_equal_runs_have_no_difference() -> None:
    a, b = (record(crowd(15), engine=ENGINE, workers=2) for _ in range(2))
    compared = compare_runs(a, b)
    assert compared["settings"] == []
    assert compared["first_difference"] is None
    assert compared["changed"] == 0
    assert compared["requests"] == []


def test_the_first_difference_of_two_routers_is_a_placement() -> None:
    a = record(conversations(10), engine=ENGINE, workers=3)
    b = record(conversations(10), engine=ENGINE, workers=3, routing=KvRouting())
    compared = compare_runs(a, b)
    assert {one["name"] for one in compared["settings"]} >= {"routing"}
    first = compared["first_difference"]
    assert first["a"]["kind"] == first["b"]["kind"] == "placed"
    assert first["a"]["request"] == first["b"]["request"]
    assert first["a"]["worker"] != first["b"]["worker"]


def test_the_first_difference_of_two_budgets_is_a_step() -> None:
    workload = single_turns([100, 100], 3, arrival_ms=[0, 50])
    a = record(workload, engine=ENGINE)
    b = record(workload, engine=msgspec.structs.replace(ENGINE, max_num_batched_tokens=64))
    compared = compare_runs(a, b)
    assert {"name": "engine.max_num_batched_tokens", "a": 2048, "b": 64} in compared["settings"]
    first = compared["first_difference"]
    assert first["time_ns"] == 0
    assert first["a"]["what"] == "a step began with 100 prompt tokens of 0"
    assert first["b"]["what"] == "a step began with 64 prompt tokens of 0"


def test_the_first_difference_of_two_clocks_is_the_end_of_a_step() -> None:
    workload = single_turns([100], 3)
    slow = msgspec.structs.replace(ENGINE, timing=Constant(prefill_ms=10.0, decode_ms=2.0))
    first = find_first_difference(record(workload, engine=ENGINE), record(workload, engine=slow))
    assert first is not None
    assert (first["a"]["kind"], first["b"]["kind"]) == ("step_end", "step_end")
    assert first["time_ns"] == first["a"]["time_ns"] < first["b"]["time_ns"]


def test_changes_are_told_by_cause_and_add_up() -> None:
    a = record(crowd(30), engine=ENGINE)
    b = record(crowd(30), engine=msgspec.structs.replace(ENGINE, num_gpu_blocks=4000))
    compared = compare_runs(a, b, most=5)
    assert len(compared["requests"]) == 5
    for one in compared["requests"]:
        assert sum(one["parts"].values()) == one["change_ns"]
        assert one["latency_ns"]["b"] - one["latency_ns"]["a"] == one["change_ns"]
        assert one["parts"][one["cause"]] * one["change_ns"] > 0
    causes = compared["causes"]
    assert sum(causes["parts"].values()) == causes["change_ns"]
    assert causes["parts"]["wait_blocks"] < 0  # more blocks, less waiting for them
    changes = [abs(one["change_ns"]) for one in compared["requests"]]
    assert changes == sorted(changes, reverse=True)


def test_runs_of_different_workloads_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="different workloads"):
        compare_runs(record(crowd(5), engine=ENGINE), record(crowd(6), engine=ENGINE))


def test_the_command_line_prints_and_writes_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 10 * at, "input_length": 600, "output_length": 8, "hash_ids": [at % 2, at + 5]}
        for at in range(8)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    a, b = str(tmp_path / "a.npz"), str(tmp_path / "b.npz")
    assert main(["replay", str(trace), "--save-run", a, "--quiet"]) == 0
    assert main(["replay", str(trace), "--workers", "2", "--save-run", b, "--quiet"]) == 0
    assert main(["diff", a, b]) == 0
    printed = capsys.readouterr().out
    assert "first difference" in printed
    assert "requests changed" in printed
    assert main(["diff", a, b, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == "understudy.diff/1"
    assert main(["diff", a, a]) == 0
    assert "decisions: equal" in capsys.readouterr().out

"""Saved runs: what is written is read again, and other files are refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

import understudy as us
from explain.random_runs import record
from replay.building import crowd
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument
from understudy.explain import read_run
from understudy.explain.saved_run import REQUEST_COLUMNS
from understudy.router.kv import KvRouting

if TYPE_CHECKING:
    from pathlib import Path

ENGINE = VllmConfig(block_size=16, num_gpu_blocks=200)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 20 * at, "input_length": 200 + at, "output_length": 5, "hash_ids": [at % 3]}
        for at in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_saved_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = record(crowd(20), engine=ENGINE, workers=2, routing=KvRouting())
    run.save(tmp_path / "run.npz")
    read = read_run(tmp_path / "run.npz")
    assert read.run == run.run
    assert read.block_size == 16
    assert read.worker_blocks == (200, 200)
    for name, column in run.steps.arrays().items():
        assert np.array_equal(column, read.steps.arrays()[name]), name
    for name in REQUEST_COLUMNS:
        assert np.array_equal(run.requests[name], read.requests[name]), name
    assert np.array_equal(run.decisions["cost_regret"], read.decisions["cost_regret"])


def test_the_api_saves_a_run(tmp_path: Path) -> None:
    report = us.replay(crowd(10), ENGINE, outputs=us.Outputs(save_run=tmp_path / "run.npz"))
    assert report.saved is not None
    assert read_run(tmp_path / "run.npz").run["digest"] == report.run.digest
    assert us.replay(crowd(10), ENGINE).saved is None


def test_the_command_line_explains_a_saved_run(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "run.npz")
    assert main(["replay", str(trace), "--workers", "2", "--save-run", saved, "--quiet"]) == 0
    assert read_run(saved).run["workload"] == "trace.jsonl"
    assert main(["explain", saved, "--slowest", "3"]) == 0
    assert "latency of 3 requests" in capsys.readouterr().out
    assert main(["explain", saved, "--request", "4", "--json", "-"]) == 0
    explained = json.loads(capsys.readouterr().out)
    (one,) = explained["requests"]
    assert one["row"] == 4
    assert sum(one["parts"].values()) == one["latency_ns"] == explained["latency_ns"]
    assert sum(span["duration_ns"] for span in one["spans"]) == one["latency_ns"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--request", "99"], "no request '99'"), (["--slowest", "0"], "--slowest must be at least 1")],
)
def test_a_request_that_is_not_there_is_refused(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    saved = str(tmp_path / "run.npz")
    assert main(["replay", str(trace), "--save-run", saved, "--quiet"]) == 0
    assert main(["explain", saved, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_saved_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("{}")
    np.savez(tmp_path / "other.npz", column=np.arange(3))
    header = np.frombuffer(json.dumps({"format": "understudy.run/9"}).encode(), np.uint8)
    np.savez(tmp_path / "future.npz", header=header)
    for name in ("text.npz", "other.npz"):
        with pytest.raises(InvalidArgument, match="is not a saved run"):
            read_run(tmp_path / name)
    with pytest.raises(InvalidArgument, match=r"format must be understudy\.run/1"):
        read_run(tmp_path / "future.npz")


def test_a_damaged_run_names_the_column(tmp_path: Path) -> None:
    run = record(crowd(5), engine=ENGINE)
    run.save(tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz") as archive:
        arrays = {name: archive[name] for name in archive.files if name != "step_stop"}
    np.savez(tmp_path / "cut.npz", **arrays)
    with pytest.raises(InvalidArgument, match="step_stop is missing"):
        read_run(tmp_path / "cut.npz")
    np.savez(tmp_path / "short.npz", **arrays, step_stop=np.zeros(1, np.uint8))
    with pytest.raises(InvalidArgument, match="different lengths"):
        read_run(tmp_path / "short.npz")


def test_steps_are_not_recorded_live_or_by_the_real_engine(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--save-run", "--perfetto"):
        assert main(["replay", str(trace), "--online", flag, str(tmp_path / "x"), "--quiet"]) == 2
        assert f"{flag} is written offline only" in capsys.readouterr().err


def test_the_page_of_a_saved_run_shows_why_the_slowest_percent_is_slow(tmp_path: Path) -> None:
    report = us.replay(crowd(20), ENGINE, execution=us.Execution(keep_steps=True))
    assert "Why the slowest percent is slow" in report.to_html()
    assert "Why the slowest percent is slow" not in us.replay(crowd(20), ENGINE).to_html()


def test_a_file_that_is_no_saved_run_is_not_named_as_the_one_to_write(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n")
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl is not a saved run; write one with") as refused:
        read_run(trace)
    assert f"--save-run {trace}" not in str(refused.value)  # it would overwrite the trace
    assert "pickle" not in str(refused.value)
    with pytest.raises(InvalidArgument, match=r"cannot read .*: No such file or directory"):
        read_run(tmp_path / "missing.npz")

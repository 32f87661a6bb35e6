"""Flags of `calibrate` do something, or are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from calibrate import files
from timing.test_hardware import CALIBRATED
from understudy.cli import main

if TYPE_CHECKING:
    from pathlib import Path

TABLE = "isl,osl,conc,mean_ttft_ms,mean_tpot_ms\n500,20,4,60,9\n"


@pytest.fixture
def timing(tmp_path: Path) -> Path:
    path = tmp_path / "timing.yaml"
    path.write_text(CALIBRATED.text())
    return path


def detailed(path: Path, **metadata: Any) -> Path:
    load = files.open_load(20)
    return files.vllm_detailed(path, load, files.measure(load, CALIBRATED.efficiencies), **metadata)


def test_a_check_of_times_in_the_engine_adds_nothing_around_it(
    timing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = tmp_path / "bench.csv"
    bench.write_text(TABLE)
    check = ["calibrate", "check", str(bench), "--timing", str(timing)]
    assert main(check) == 0
    at_the_client = capsys.readouterr().out
    assert main([*check, "--in-engine"]) == 0
    assert capsys.readouterr().out != at_the_client  # 5 ms of 60, and none of TPOT


def test_a_least_length_is_for_files_that_leave_lengths_open(
    timing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, table = detailed(tmp_path / "bench.json"), tmp_path / "bench.csv"
    table.write_text(TABLE)
    flags = ["--timing", str(timing), "--least-length", "0.5"]
    assert main(["calibrate", "check", str(bench), *flags]) == 2
    said = capsys.readouterr().err
    assert "--least-length is for summaries without a range of lengths" in said
    assert "(vllm bench serve, detailed) contain it; leave it out" in said
    assert main(["calibrate", "check", str(bench), str(table), *flags]) == 0


def test_a_setting_that_every_file_names_otherwise_is_refused(
    timing: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = detailed(tmp_path / "named.json", max_num_seqs="64")
    silent = detailed(tmp_path / "silent.json")
    check = ["calibrate", "check", str(named), "--timing", str(timing), "--max-num-seqs"]
    assert main([*check, "32"]) == 2
    assert (
        "--max-num-seqs is for files that lack this setting, and each of these files has it (max_num_seqs: 64)"
        in capsys.readouterr().err
    )
    assert main([*check, "64"]) == 0
    both = ["calibrate", "check", str(named), str(silent), "--timing", str(timing)]
    assert main([*both, "--max-num-seqs", "32"]) == 0

"""A calibration leaves at the preset what the benchmarks do not determine, and never exceeds a peak."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import yaml

from calibrate import files
from understudy.calibrate.load import random_lengths
from understudy.cli import main
from understudy.timing.presets import preset

if TYPE_CHECKING:
    from pathlib import Path

PRESET = preset(files.DEPLOYMENT.model, files.DEPLOYMENT.gpu, "bf16", "bf16").efficiencies
FLAGS = [
    "--model",
    "Llama-3.1-8B",
    "--gpu",
    "H100",
    "--max-num-seqs",
    "64",
    "--max-num-batched-tokens",
    "4096",
]


def measure_rows(path: Path, truth: Any, shapes: list[tuple[int, int, int]], noise: float = 1.0) -> Path:
    """Write the table of a benchmark that ran with known numbers."""
    lines = ["isl,osl,conc,mean_ttft_ms,mean_tpot_ms,max_num_seqs"]
    for place, (isl, osl, concurrency) in enumerate(shapes):
        load = random_lengths(isl, osl, least=0.8, concurrency=concurrency, prompts=5 * concurrency, seed=3)
        seen = files.measure(load, truth)
        factor = noise if place % 2 else 1 / noise
        lines.append(
            f"{isl},{osl},{concurrency},{seen.mean('ttft_ms') * factor},{seen.mean('tpot_ms') * factor},{files.SEQS}"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def calibrate(bench: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    timing = folder / "timing.yaml"
    assert main(["calibrate", str(bench), *FLAGS, "-o", str(timing)]) == 0
    said = capsys.readouterr()
    return yaml.safe_load(timing.read_text()), said.out + said.err


@pytest.mark.parametrize(
    ("shapes", "noise"),
    [([(1024, 64, 1)], 1.0), ([(512, 64, 2), (1024, 64, 16)], 1.15)],
    ids=["one row", "noisy"],
)
def test_numbers_that_the_rows_do_not_determine_are_the_presets(
    shapes: list[tuple[int, int, int]], noise: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = msgspec.structs.replace(PRESET, weights=0.7, step_ms=1.6)
    file, said = calibrate(measure_rows(tmp_path / "rows.csv", truth, shapes, noise), tmp_path, capsys)
    held = [one for one in file["fitted"] if not one["determined"]]
    assert held
    for one in held:
        assert one["value"] == one["preset"] == getattr(PRESET, one["name"])
        assert file["efficiencies"][one["name"]] == one["preset"]
        assert re.search(rf"{one['name']} .*no: held at the preset", said)


def test_numbers_that_the_rows_determine_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = msgspec.structs.replace(PRESET, weights=0.6)
    shapes = [(1024, 64, 1), (1024, 64, 16), (3000, 32, 8)]
    file, _ = calibrate(measure_rows(tmp_path / "rows.csv", truth, shapes), tmp_path, capsys)
    [weights] = [one for one in file["fitted"] if one["name"] == "weights"]
    assert weights["determined"]
    assert weights["value"] == pytest.approx(0.6, rel=0.1)


def test_a_bandwidth_above_the_peak_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    truth = msgspec.structs.replace(PRESET, weights=2.5)
    shapes = [(1024, 64, 1), (1024, 64, 4), (1024, 64, 16), (512, 64, 8)]
    rows = measure_rows(tmp_path / "rows.csv", truth, shapes)
    file, said = calibrate(rows, tmp_path, capsys)
    assert file["efficiencies"]["weights"] <= 1
    assert "times the peak of a H100" in said
    assert "held at the preset" in said

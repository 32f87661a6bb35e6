"""Stages of a pipeline, and ranks that share experts: replay, predict and sweep say the same times and GPUs."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

import pytest

from answers.test_agreement import report_of, run, write_trace

if TYPE_CHECKING:
    from pathlib import Path

FLEETS = {
    "stages": (
        ["--model", "Llama-3.1-70B", "--weight-dtype", "fp8", "--pipeline-parallel-size", "2"],
        ["--pipeline-parallel-size 2"],
        2,
    ),
    "ranks and whole experts": (
        ["--model", "Qwen3-30B-A3B", "--data-parallel-size", "4", "--enable-expert-parallel"],
        ["--data-parallel-size 4", "--enable-expert-parallel"],
        4,
    ),
}


@pytest.mark.parametrize("name", FLEETS)
def test_three_verbs_agree(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags, words, gpus = FLEETS[name]
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, 24, 900, 12, seed=5, gap_ms=15.0)
    where = [str(trace), "--trace-block-size", "16", "--gpu", "H100", *flags]
    replayed = report_of(["replay", *where], capsys)
    rows = list(csv.DictReader(run(["predict", *where, "--format", "mooncake"], capsys)[0].splitlines()))
    for measure in ("ttft_ms", "e2e_ms"):
        mean = sum(float(row[measure]) for row in rows) / len(rows)
        # Ranks: a replay chooses as vLLM's front end does, a prediction takes the rank with the least load.
        allowed = 1e-4 if name == "stages" else 0.02
        assert mean == pytest.approx(replayed[measure]["mean"], rel=allowed), measure
    swept = report_of(
        ["sweep", *where, "--vary", "workers=1", "--slo-e2e-ms", "100000", "--jobs", "1"], capsys
    )
    (trial,) = swept["trials"]
    assert trial["digest"] == replayed["run"]["digest"]
    assert trial["gpus"] == gpus
    (engine,) = trial["engines"]
    assert all(word in engine["command"] for word in words)

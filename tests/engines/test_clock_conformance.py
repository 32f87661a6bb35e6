"""The engine against recordings of vLLM's engine loop on a clock, equal to the nanosecond."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from understudy.conformance.clock import (
    ClockRecording,
    compare_clock,
    describe_difference,
    run_clock_scenario,
)
from understudy.errors import InvalidArgument
from understudy.workload.scenario import read_file_as

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-clock"
NAMES = sorted(path.name.removesuffix(".json.gz") for path in GOLDEN.glob("*.json.gz"))


def test_all_recordings_are_here() -> None:
    assert len(NAMES) == 20
    modes = {
        read_file_as(ClockRecording, path).scenario.config.async_scheduling
        for path in GOLDEN.glob("*.json.gz")
    }
    assert modes == {False, True}


@pytest.mark.parametrize("name", NAMES)
def test_every_batch_and_token_comes_when_it_was_recorded(name: str) -> None:
    outcome = compare_clock(GOLDEN / f"{name}.json.gz", check=True)
    assert (outcome.name, outcome.difference) == (name, None)
    assert outcome.steps > 50


def test_a_difference_is_told_by_its_first_batch() -> None:
    recording = read_file_as(ClockRecording, GOLDEN / f"{NAMES[0]}.json.gz")
    ours = run_clock_scenario(recording.scenario)
    start, end, batch = ours.trace[3]
    ours.trace[3] = (start, end + 1, batch)
    assert str(describe_difference(ours, recording.recorded)).startswith(
        f"batch 3: batch is [{start}, {end + 1}"
    )
    ours.trace[3] = (start, end, batch)
    ours.first["r0"] += 1
    assert str(describe_difference(ours, recording.recorded)).startswith("r0: first is")


def test_a_file_that_is_no_recording_is_refused_by_name(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "odd.json.gz", "wt") as file:
        json.dump({"scenario": {"step_ns": 1}}, file)
    with pytest.raises(InvalidArgument, match=r"odd\.json\.gz.*per_token_ns"):
        compare_clock(tmp_path / "odd.json.gz")

"""The drill for TensorRT-LLM with our own engine in place of the real executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from release.fakes import RefusingRecorder, TrtEngineRecorder
from release.trtllm_drill import find_situations, run_trtllm_family
from release.trtllm_families import TRTLLM_FAMILIES
from understudy.conformance.trtllm import compare_trtllm, find_trtllm_recordings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("family", [*TRTLLM_FAMILIES])
def test_our_engine_is_identical_to_itself(family: str, tmp_path: Path) -> None:
    result = run_trtllm_family(family, range(3), TrtEngineRecorder(), tmp_path)
    assert (result.recorded, result.differ) == (3, 0)


@pytest.mark.parametrize("draw", TRTLLM_FAMILIES.values(), ids=[*TRTLLM_FAMILIES])
def test_the_same_seed_gives_the_same_scenario(draw: Any) -> None:
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_a_changed_pass_is_found_and_kept(tmp_path: Path) -> None:
    def change(recorded: list[dict[str, Any]]) -> None:
        recorded[1]["waiting"] += 1

    result = run_trtllm_family("plain", range(2), TrtEngineRecorder(change), tmp_path)
    assert (result.recorded, result.differ) == (2, 2)
    kept = find_trtllm_recordings(tmp_path / "plain")
    assert [one.name for one in kept] == ["plain_0", "plain_1"]
    assert str(compare_trtllm(kept[0]).difference).startswith("step 0: waiting is ")


def test_a_scenario_that_cannot_be_recorded_is_counted_by_its_reason(tmp_path: Path) -> None:
    result = run_trtllm_family("plain", range(2), RefusingRecorder(), tmp_path)
    assert (result.recorded, sum(result.failed.values())) == (0, 2)


def test_rare_situations_of_a_recording_are_named() -> None:
    line = {"copies": [["host>disk", 1, 4096]], "suspended": [], "recompute": [3]}
    header = {"pools": [[[4, 1], [2, 1]]], "config": {"reuse_policy": "per_request", "windows": [64]}}
    before = {"copies": [], "suspended": [], "recompute": [], "gen": [1], "ctx": [[3, 0, 9]]}
    assert find_situations([header, before, {**before, **line}, {"end": "done"}]) == [
        *("several groups of pools", "copies from or to disk", "per_request with windows"),
        *("recompute", "recompute of the batch before"),
    ]

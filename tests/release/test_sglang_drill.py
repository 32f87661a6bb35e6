"""The drill for SGLang with our own engine in place of the real scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from release.fakes import RefusingRecorder, SglangEngineRecorder
from release.sglang_drill import run_sglang_family
from release.sglang_families import SGLANG_FAMILIES
from understudy.conformance.sglang import compare_sglang, find_sglang_recordings

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("family", [*SGLANG_FAMILIES])
def test_our_engine_is_identical_to_itself(family: str, tmp_path: Path) -> None:
    result = run_sglang_family(family, range(4), SglangEngineRecorder(), tmp_path)
    assert (result.recorded, result.differ) == (4, 0)


@pytest.mark.parametrize("family", [*SGLANG_FAMILIES])
def test_the_same_seed_gives_the_same_scenario(family: str) -> None:
    _, draw = SGLANG_FAMILIES[family]
    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


def test_a_changed_step_is_found_and_kept(tmp_path: Path) -> None:
    def change(recorded: list[dict[str, Any]]) -> None:
        recorded[1]["avail"] += 1

    result = run_sglang_family("plain", range(2), SglangEngineRecorder(change), tmp_path, calls=20)
    assert (result.recorded, result.differ) == (2, 2)
    kept = find_sglang_recordings(tmp_path / "plain")
    assert [one.name for one in kept] == ["plain_0", "plain_1"]
    assert str(compare_sglang(kept[0]).difference).startswith("step 0: avail is ")
    assert len(find_sglang_recordings(tmp_path / "smallest" / "plain")) == 1


def test_a_scenario_that_sglang_refuses_is_counted_by_its_reason(tmp_path: Path) -> None:
    result = run_sglang_family("plain", range(2), RefusingRecorder(), tmp_path)
    assert (result.recorded, sum(result.failed.values())) == (0, 2)

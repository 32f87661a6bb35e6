"""The drill with our own engine in place of a vLLM release."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from release.drill import find_smallest, run_family
from release.fakes import EngineRecorder, RefusingRecorder
from release.families import FAMILIES
from understudy.conformance.compare import compare_all

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", [*FAMILIES])
def test_a_release_that_changed_nothing_is_identical(name: str, tmp_path: Path) -> None:
    result, differing = run_family(FAMILIES[name], range(4), EngineRecorder("0.33.0"), "0.33", tmp_path)
    assert (result.recorded, result.differ, differing) == (4, 0, [])
    assert all(outcome.difference is None for outcome in compare_all(tmp_path))


@pytest.mark.parametrize("name", ["priority", "lora", "interval", "spec", "async-spec", "offload"])
def test_rules_of_0_33_are_found_under_the_profile_of_0_32(name: str, tmp_path: Path) -> None:
    result, differing = run_family(FAMILIES[name], range(12), EngineRecorder("0.33.0"), "0.32", tmp_path)
    assert result.differ == len(differing) > 0
    assert sum(result.keys.values()) == result.differ
    sizes = [len(scenario["requests"]) for _, scenario in differing]
    assert sizes == sorted(sizes)


def test_a_difference_shrinks_to_a_scenario_that_still_differs(tmp_path: Path) -> None:
    family, recorder = FAMILIES["lora"], EngineRecorder("0.33.0")
    _, differing = run_family(family, range(8), recorder, "0.32", tmp_path / "all")
    name, scenario = differing[0]
    recorder.calls = 0
    smallest = find_smallest(family, name, scenario, recorder, "0.32", tmp_path, calls=300)
    assert recorder.calls <= 302
    assert len(smallest.scenario["requests"]) <= 5
    assert smallest.steps <= 30
    assert smallest.difference.startswith("step ")
    (kept,) = compare_all(tmp_path / "smallest")
    assert kept.name == name
    assert kept.difference is None  # under the release that recorded it


def test_scenarios_that_a_release_refuses_are_counted_by_their_reason(tmp_path: Path) -> None:
    result, _ = run_family(FAMILIES["versions"], range(3), RefusingRecorder(), "0.33", tmp_path)
    assert (result.recorded, result.failed) == (0, {"ValueError: steps of 4 keys is not known": 3})


@pytest.mark.parametrize("name", [*FAMILIES])
def test_the_same_seed_gives_the_same_scenario(name: str) -> None:
    assert FAMILIES[name].scenario(5) == FAMILIES[name].scenario(5)
    assert FAMILIES[name].scenario(5) != FAMILIES[name].scenario(6)

"""The soak driver finds what goes wrong and says how to see it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import soak

if TYPE_CHECKING:
    import pytest


def test_a_few_scenarios_of_every_kind_pass() -> None:
    assert soak.play(list(soak.KINDS), range(4 * len(soak.KINDS))) is None


def test_a_failure_names_its_kind_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(seed: int) -> None:
        assert seed != 7, "seven"

    monkeypatch.setitem(soak.KINDS, "fast_forward", fails_once)
    told = soak.play(["fast_forward"], range(10))
    assert told is not None
    assert "AssertionError: seven" in told
    assert "--kind fast_forward --seed 7 --count 1" in told
    assert soak.play(["fast_forward"], range(7)) is None


def test_seeds_are_shared_out_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.soak(["model"], 100, seconds=60, count=30, jobs=2) == 0
    assert "30 scenarios from seed 100, all well" in capsys.readouterr().err

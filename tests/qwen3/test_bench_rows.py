"""The table of `qwen3 bench` has as many rows as its counter says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.qwen3.bench import ROWS, Bench

if TYPE_CHECKING:
    import pytest


def test_the_rows_that_are_counted_are_those_that_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("decode", "whole_step", "prefill", "cached_first_token", "restore"):
        monkeypatch.setattr(Bench, name, lambda *_: None)
    assert len(list(Bench.__new__(Bench).rows())) == ROWS

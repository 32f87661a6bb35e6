"""Fan-outs and quick turns: what is shared, when, and how often."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from understudy.cli import main
from understudy.errors import ConfigError
from understudy.workload import read_trace
from understudy.workload.families import FanOut, QuickTurns


def prompts(workload: Any) -> list[tuple[int, ...]]:
    ids, offsets = workload.hash_ids.tolist(), workload.hash_offsets.tolist()
    return [tuple(ids[a:b]) for a, b in pairwise(offsets)]


def test_children_of_a_context_share_it_and_nothing_else() -> None:
    workload = FanOut(contexts=5, children=3, context_tokens=1024, question_tokens=(10, 600)).build()
    families: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for prompt in prompts(workload):
        families.setdefault(prompt[:2], []).append(prompt[2:])
    assert [len(tails) for tails in families.values()] == [3] * 5
    rest = [block for tails in families.values() for tail in tails for block in tail]
    assert len(set(rest)) == len(rest)
    assert (np.diff(workload.arrival_ns) >= 0).all()


def test_a_turn_repeats_all_before_it() -> None:
    workload = QuickTurns(sessions=4, turns=3, first_tokens=1024, turn_tokens=512).build()
    by_session: dict[int, list[tuple[int, ...]]] = {}
    for prompt in prompts(workload):
        by_session.setdefault(prompt[0], []).append(prompt)
    for turns in by_session.values():
        assert [len(turn) for turn in turns] == [2, 3, 4]
        assert turns[2][:3] == turns[1]
        assert turns[1][:2] == turns[0]
    assert len(by_session) == 4


def test_equal_settings_give_equal_workloads() -> None:
    one, same, other = (FanOut(contexts=9, seed=seed).build() for seed in (1, 1, 2))
    assert (one.arrival_ns == same.arrival_ns).all()
    assert (one.arrival_ns != other.arrival_ns).any()


@pytest.mark.parametrize(
    "spec",
    [
        FanOut(contexts=0),
        FanOut(question_tokens=(0, 5)),
        FanOut(context_interval_ms=0),
        QuickTurns(think_ms=(5, 4)),
        QuickTurns(turns=0),
    ],
)
def test_settings_that_make_no_sense_are_refused(spec: FanOut | QuickTurns) -> None:
    with pytest.raises(ConfigError):
        spec.build()


@pytest.mark.parametrize("kind", ["fanout", "turns"])
def test_the_command_writes_a_trace(kind: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl.gz"
    assert main(["workload", kind, "--count", "3", "-o", str(path)]) == 0
    spec = FanOut(contexts=3) if kind == "fanout" else QuickTurns(sessions=3)
    assert (read_trace(path).prompt_tokens == spec.build().prompt_tokens).all()
    assert "requests" in capsys.readouterr().err
    assert main(["workload", kind, "-o", str(tmp_path / "no" / "x")]) == 2

"""Plays of a run: their length, and the parts of their critical paths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from replay.test_plays import DIAMOND, FixedPasses, make, play
from understudy.errors import InvalidArgument
from understudy.report.plays import PARTS, measure_plays
from understudy.workload import Plays


def test_parts_of_the_critical_path_add_up_to_the_makespan() -> None:
    workload = make([*DIAMOND, (5, 4, 1, 20)], [0, 0, 0, 0, 1, 1], not_before_ms=[5, 0, 0, 0, 0, 900])
    timeline = play(workload, Plays(clock="recorded"), timing=FixedPasses(10, 1))
    plays = measure_plays(workload, timeline)
    assert plays.requests.tolist() == [4, 2]
    assert np.array_equal(sum(plays.parts_ns[name] for name in PARTS), plays.makespan_ns)
    assert plays.makespan_ns[0] == timeline.finish_ns[:4].max() - timeline.arrival_ns[:4].min()
    assert sum(plays.shares().values()) == pytest.approx(1)


def test_the_gap_of_tools_is_between_an_answer_and_the_request_behind_it() -> None:
    workload = make([(1, 0, 1, 70)], [0, 0])
    plays = measure_plays(workload, play(workload, timing=FixedPasses(10, 1)))
    assert plays.parts_ns["gap"].tolist() == [70_000_000]
    assert plays.parts_ns["prefill"].tolist() == [20_000_000]
    assert plays.parts_ns["decode"].tolist() == [1_000_000]
    assert plays.names == ["play_0"]


def test_a_path_over_a_dispatch_leaves_out_the_service_of_that_request() -> None:
    workload = make([(1, 0, 0, 300)], [0, 0])
    plays = measure_plays(workload, play(workload, timing=FixedPasses(10, 1)))
    assert plays.parts_ns["gap"].tolist() == [300_000_000]
    assert plays.parts_ns["prefill"].tolist() == [10_000_000]


def test_a_workload_without_a_graph_has_no_plays() -> None:
    workload = replace(make([], [0]), graph=None)
    with pytest.raises(InvalidArgument, match="has no plays"):
        measure_plays(workload, play(workload))

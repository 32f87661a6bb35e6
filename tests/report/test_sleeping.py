"""Sleeping sessions of a run: the KV that they need, and where it was when they returned."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from replay.test_plays import DIAMOND, FixedPasses, make, play
from replay.test_session_kv import CROWD, TIERS, run
from replay.test_session_kv import make as make_sessions
from understudy.errors import InvalidArgument
from understudy.report.play_picture import draw_play, find_play
from understudy.report.plays import measure_plays
from understudy.report.sleeping import PLACES, measure_sleep


def test_tokens_of_a_returning_session_were_somewhere() -> None:
    workload = make_sessions([[(0, 2), (500, 2), (300, 2)], [(100, 2), (900, 2)]])
    timeline = run(workload).timeline
    sleep = measure_sleep(workload, timeline)
    assert len(sleep) == 3
    assert sleep.known_tokens.tolist() == [160, 160, 160]
    assert np.array_equal(sleep.found_tokens.sum(axis=1), sleep.known_tokens)
    assert sleep.shares()["GPU"] == 1
    assert sorted(sleep.slept_ns.tolist()) == [300_000_000, 500_000_000, 900_000_000]


@pytest.mark.parametrize(("tiers", "place"), [(None, "computed again"), (TIERS, "G2")])
def test_evicted_tokens_are_loaded_or_computed_again(tiers: Any, place: str) -> None:
    workload = make_sessions(CROWD)
    sleep = measure_sleep(workload, run(workload, tiers=tiers).timeline)
    assert sleep.shares()[place] == 1
    assert list(sleep.ttft_ms_by_place()) == [place]
    assert place in sleep.describe()


def test_kv_of_sleeping_sessions_is_a_sum_over_time() -> None:
    workload = make_sessions([[(0, 2), (500, 2)], [(100, 2), (900, 2)]])
    timeline = run(workload).timeline
    sleep = measure_sleep(workload, timeline)
    assert sleep.sleeping_tokens.max() == 2 * 163
    assert sleep.sleeping_tokens[-1] == 0
    asleep = sleep.slept_ns.sum() * 163 / (sleep.time_ns[-1] - sleep.time_ns[0])
    assert sleep.mean_sleeping_tokens() == pytest.approx(asleep)
    assert sleep.capacity_tokens == 40 * 16
    assert len(PLACES) == sleep.found_tokens.shape[1]


def test_loads_of_blocks_are_the_transfer_of_a_critical_path() -> None:
    workload = make([(1, 0, 1, 70)], [0, 0])
    timeline = play(workload, timing=FixedPasses(10, 1))
    plays = measure_plays(workload, timeline)
    assert plays.parts_ns["transfer"].tolist() == [0]
    assert plays.slowest() == 0
    assert plays.rows()[0]["play"] == "play_0"


def test_a_picture_of_a_play_has_a_lane_per_session_and_its_critical_path() -> None:
    workload = make([*DIAMOND, (5, 4, 1, 20)], [0, 0, 0, 0, 1, 1], request_ids=[*"abcde", "<f>"])
    timeline = play(workload, timing=FixedPasses(10, 1))
    root = ElementTree.fromstring(draw_play(workload, timeline, 0))
    names = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert [name.partition(":")[0] for name in names] == [*"abcd"]
    path = next(root.iter("{http://www.w3.org/2000/svg}polyline")).attrib["points"].split()
    times = [float(point.partition(",")[0]) for point in path]
    assert times == sorted(times, reverse=True)
    assert "&lt;f&gt;" in draw_play(workload, timeline, 1)
    assert all(re.fullmatch(r"-?[0-9.]+,-?[0-9.]+", point) for point in path)


def test_a_play_that_is_not_there_is_named() -> None:
    workload = make([], [0])
    with pytest.raises(InvalidArgument, match="is not in the trace"):
        find_play(workload, "other")

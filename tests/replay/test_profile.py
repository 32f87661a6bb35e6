"""Plays for a duration: snapshot, warm-up, fresh copies, the end of the time, and idle caps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import understudy as us
from replay.test_plays import FixedPasses, make, play
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.offline import run_offline
from understudy.run.profile_run import run_profile
from understudy.run.run_plan import RunPlan
from understudy.run.timeline import Status
from understudy.workload import Plays, Workload, read_trace, scale_users
from understudy.workload.agents.profile import make_profile

GOLDEN = Path(__file__).parents[1] / "golden" / "agents"
ENGINE = VllmConfig(num_gpu_blocks=4096, block_size=64, async_scheduling=False)


def profile(workload: Workload, load: Plays, **more: Any) -> Any:
    more.setdefault("timing", FixedPasses(100, 50))
    return run_profile(RunPlan(workload, more.pop("engine", ENGINE), load=load, check=True, **more))


def test_a_warm_up_sends_a_primer_per_live_session_and_ten_requests_per_lane() -> None:
    """The sample of the specification: 22 requests of passes of 100 ms, the last of which ends at 1,100 ms."""
    workload = read_trace(GOLDEN / "weka.jsonl")
    engine = msgspec.structs.replace(ENGINE, max_num_batched_tokens=16_384)
    run, _ = profile(workload, Plays(lanes=2, warm_up=True, duration_s=120), engine=engine, seed=42)
    assert run.notes[-1].startswith("warm-up: 22 requests of one token, until 1.100 s; duration 120 s: ")
    assert run.play_begin_ns == 1_100_000_000
    assert run.timeline.arrival_ns.min() >= run.play_begin_ns


def test_history_becomes_timers_and_live_sessions_have_primers() -> None:
    workload = make(
        [(1, 0, 1, 900), (2, 1, 1, 900), (3, 2, 1, 900), (4, 0, 0, 2100)],
        [0] * 5,
        not_before_ms=[0, 1000, 2000, 3000, 2100],
    )
    sessions = np.array([0, 0, 0, 0, 1], np.int32)
    workload = replace(workload, session=sessions, turn=np.array([0, 1, 2, 3, 0], np.int32))
    made = make_profile(workload, lanes=1, warm_up=True, client_clock=True, copies=1, seed=1)
    graph = made.workload.graph
    assert graph is not None
    left = made.source[made.prepared_rows :].tolist()
    cut_ms = 3000 * (0.25 + 0.5 * np.random.default_rng(1).random())
    assert left == [row for row, ms in enumerate([0, 1000, 2000, 3000, 2100]) if ms >= cut_ms]
    assert made.prepared_rows == 11
    assert made.workload.output_tokens[:11].tolist() == [1] * 11
    first = made.prepared_rows
    assert graph.not_before_ns[first] / 1e6 == pytest.approx([0, 1000, 2000, 3000, 2100][left[0]] - cut_ms)
    assert not graph.dependencies(first)  # what it waited for is history


def test_copies_have_blocks_of_their_own() -> None:
    workload = make([(1, 0, 1, 5)], [0, 0, 1])
    made = make_profile(workload, lanes=1, warm_up=False, client_clock=True, copies=3, seed=0)
    assert len(made.workload) == 9
    assert len(set(made.workload.hash_ids.tolist())) == 9
    assert made.workload.graph is not None
    assert made.workload.graph.play_ids == [
        "play_0",
        "play_1",
        "play_0#1",
        "play_1#1",
        "play_0#2",
        "play_1#2",
    ]


def test_copies_of_users_are_copied_too() -> None:
    users = scale_users(make([(1, 0, 1, 5)], [0, 0], request_ids=["a", "b"]), 2)
    made = make_profile(users, lanes=1, warm_up=False, client_clock=True, copies=2, seed=0)
    assert made.workload.request_ids == ["a", "b", "a#1", "b#1", "a##1", "b##1", "a#1##1", "b#1##1"]


def test_plays_start_again_until_the_duration_ends() -> None:
    workload = make([(1, 0, 1, 300)], [0, 0, 1])
    run, kept = profile(workload, Plays(lanes=1, duration_s=10))
    assert kept.graph is not None
    assert kept.graph.plays > 4
    assert run.timeline.arrival_ns.max() < 10**10
    assert (run.timeline.finish_ns >= 0).all()
    assert len(kept) == len(run.timeline)
    once = play(workload, Plays(lanes=1), timing=FixedPasses(100, 50))
    assert run.timeline.arrival_ns[:3].tolist() == once.arrival_ns.tolist()


def test_requests_that_run_past_the_grace_are_cancelled() -> None:
    workload = make([], [0, 1])
    timing = FixedPasses(400, 400)
    run, _ = profile(workload, Plays(lanes=2, duration_s=0.5, grace_s=0.1), timing=timing)
    cancelled = run.timeline.status == Status.CANCELLED
    assert cancelled.any()
    assert (run.timeline.finish_ns[cancelled] == 600_000_000).all()
    later, _ = profile(workload, Plays(lanes=2, duration_s=0.5, grace_s=100), timing=timing)
    assert (later.timeline.status == Status.COMPLETED).all()


def test_idle_time_of_a_play_and_of_all_plays_is_capped() -> None:
    workload = make([(1, 0, 1, 50_000), (3, 2, 1, 2_000)], [0, 0, 1, 1])
    usual = play(workload, Plays(lanes=2))
    assert usual.arrival_ns[1] == usual.finish_ns[0] + 50_000_000_000
    capped = play(workload, Plays(lanes=2, play_idle_s=20))
    assert capped.arrival_ns[1] == capped.finish_ns[0] + 20_000_000_000
    assert capped.arrival_ns[3] == capped.finish_ns[2] + 2_000_000_000
    both = play(workload, Plays(lanes=2, fleet_idle_s=5))
    assert both.arrival_ns[3] == both.finish_ns[2] + 2_000_000_000
    assert both.arrival_ns[1] == both.finish_ns[3] + 5_000_000_000
    for load in (Plays(lanes=2, play_idle_s=20), Plays(lanes=2, fleet_idle_s=5)):
        slow = play(workload, load, fast_forward=False)
        assert np.array_equal(slow.arrival_ns, play(workload, load).arrival_ns)


def test_a_request_that_waits_for_two_comes_forward_with_its_play() -> None:
    workload = make([(2, 0, 1, 90_000), (2, 1, 1, 10), (1, 0, 1, 60_000)], [0, 0, 0])
    capped = play(workload, Plays(lanes=1, play_idle_s=10))
    assert capped.arrival_ns[1] == capped.finish_ns[0] + 10_000_000_000
    assert capped.arrival_ns[2] - capped.finish_ns[1] <= 30_000_000_000


def test_replay_runs_profiles_and_says_so() -> None:
    report = us.replay(
        GOLDEN / "weka.jsonl", ENGINE, load=Plays(lanes=2, warm_up=True, duration_s=60), seed=42
    )
    assert any(note.startswith("warm-up: 22 requests") for note in report.run.notes)
    assert report.run.load == Plays(lanes=2, warm_up=True, duration_s=60)
    assert report.requests.total == report.requests.completed + report.requests.cancelled


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"duration_s": 5}, "needs lanes"),
        ({"warm_up": True}, "needs lanes"),
        ({"lanes": 2, "grace_s": 5}, "no effect without duration_s"),
        ({"lanes": 2, "duration_s": -1}, "must be a time"),
    ],
)
def test_profiles_that_mean_nothing_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Plays(**settings)


def test_profiles_that_cannot_be_run_are_refused() -> None:
    workload = make([(1, 0, 1, 5)], [0, 0])
    with pytest.raises(ConfigError, match="no recorded times"):
        profile(workload, Plays(lanes=1, warm_up=True))
    with pytest.raises(ConfigError, match="has 1 plays"):
        profile(workload, Plays(lanes=3, duration_s=5))
    with pytest.raises(ConfigError, match=r"use understudy\.replay"):
        run_offline(RunPlan(workload, ENGINE, load=Plays(lanes=1, warm_up=True)))

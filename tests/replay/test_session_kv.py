"""KV of sessions between their requests: held, forgotten, copied down and loaded back by named policies and a hook."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
import pytest

from replay.test_plays import DIAMOND, FixedPasses
from replay.test_plays import make as make_plays
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, PolicyError
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.session_kv import GapPredictor, Keep, SessionKv
from understudy.tiers.settings import TiersConfig
from understudy.workload import Plays, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from understudy._core import SessionSleep

BLOCK = 16
ENGINE = VllmConfig(num_gpu_blocks=40, block_size=BLOCK, max_num_batched_tokens=2048)
TIERS = TiersConfig.from_dict(
    {
        "tiers": [{"tier": "g2", "blocks": 400, "link": {"down_gbps": 10, "up_gbps": 10}}],
        "kv_bytes_per_token": 100_000,
        "offload": {"mode": "evict", "recompute_fallback": False},
    }
)


def make(sessions: list[list[tuple[int, int]]], blocks: int = 10, shared: int = 0) -> Workload:
    """Return sessions of (delay in ms, output tokens) turns; the first arrival is the delay of the first turn.

    Every turn has the prompt of the one before, which begins with `shared` blocks that all sessions have.
    """
    rows = [(session, turn) for session, turns in enumerate(sessions) for turn in range(len(turns))]
    ids = [
        [*range(shared), *range(1000 * (session + 1), 1000 * (session + 1) + blocks - shared)]
        for session, _ in rows
    ]
    return Workload(
        arrival_ns=np.array([sessions[session][0][0] * 10**6 for session, _ in rows]),
        prompt_tokens=np.full(len(rows), blocks * BLOCK + 1, np.int32),
        output_tokens=np.array([sessions[session][turn][1] for session, turn in rows], np.int32),
        hash_offsets=np.arange(len(rows) + 1) * (blocks + 1),
        hash_ids=np.array([[*one, 10**6 + row] for row, one in enumerate(ids)], np.uint32).ravel(),
        trace_block_size=BLOCK,
        session=np.array([session for session, _ in rows], np.int32),
        turn=np.array([turn for _, turn in rows], np.int32),
        delay_ns=np.array([sessions[session][turn][0] * 10**6 if turn else 0 for session, turn in rows]),
    ).sorted_by_arrival()


def run(workload: Workload, kv: SessionKv | None = None, **more: Any) -> OfflineRun:
    more.setdefault("check", True)
    engine = more.pop("engine", ENGINE)
    more.setdefault("timing", FixedPasses(10, 1))
    return run_offline(RunPlan(workload, engine, session_kv=kv, **more))


def done(found: OfflineRun) -> dict[str, float]:
    return dict(found.facts.session_kv["done"])


def hits(found: OfflineRun, workload: Workload) -> list[int]:
    """Return the hit blocks of all later turns, in row order."""
    blocks: list[int] = (found.timeline.cached_tokens_first[workload.turn > 0] // BLOCK).tolist()
    return blocks


# One session sleeps while four others of 10 blocks come and go: 40 blocks hold four of them.
CROWD = [[(0, 2), (2000, 2)], *[[(200 + 100 * one, 2)] for one in range(5)]]


class HoldUnended:
    """Holds sessions that go on."""

    def on_sleep(self, sleep: SessionSleep) -> Keep:
        """Hold all but the last answer of a session."""
        return Keep([] if sleep.is_last else ["hold"])


def test_a_held_session_finds_its_blocks_again() -> None:
    workload = make(CROWD)
    assert hits(run(workload), workload) == [0]
    held = run(workload, SessionKv(policy=HoldUnended))
    assert hits(held, workload) == [10]
    assert done(held)["holds"] == 1
    assert done(held)["peak_held_blocks"] == 10
    named = run(workload, SessionKv(hold_s=10, release="end"))
    assert hits(named, workload) == [10]
    assert named.facts.session_kv["hold_s"] == 10


def test_a_hold_ends_with_its_time_to_live() -> None:
    workload = make(CROWD)
    short = run(workload, SessionKv(hold_s=0.05))
    assert hits(short, workload) == [0]
    assert done(short)["yielded_holds"] == 0
    assert done(short)["held_block_s"] == pytest.approx(6 * 10 * 0.05, rel=0.01)  # the last has no end


def test_held_blocks_yield_to_requests_that_lack_room_the_oldest_first() -> None:
    workload = make([[(100 * one, 2), (5000, 2)] for one in range(8)])
    found = run(workload, SessionKv(hold_s=100))
    assert (found.timeline.finish_ns >= 0).all()
    assert done(found)["yielded_holds"] > 0


def test_running_requests_grow_into_held_blocks() -> None:
    workload = make([[(0, 2)], [(100, 2)], [(200, 2)], [(300, 20 * BLOCK)]])
    found = run(workload, SessionKv(hold_s=100))
    assert found.timeline.preemptions.sum() == 0
    assert done(found)["yielded_holds"] > 0


def test_fast_forwards_change_nothing() -> None:
    workload = make([[(130 * one, 3 + one), (900, 5), (700, 2)] for one in range(6)])
    for kv in (SessionKv(hold_s=0.4), SessionKv(release="end"), SessionKv(release_after_s=0.3)):
        found = run(workload, kv, check="deep", workers=2, routing="session_affinity", timing=None)
        assert any("fast-forwards equal the same steps" in note for note in found.notes), found.notes


def test_an_ended_session_leaves_what_was_there_before_it() -> None:
    workload = make([[(0, 2)], [(500, 2)], [(1000, 2)]], shared=4)
    found = run(workload, SessionKv(release="end"))
    assert (found.timeline.cached_tokens_first // BLOCK).tolist() == [
        0,
        0,
        0,
    ]  # the first had it all to itself
    assert done(found)["dropped_blocks"] == 30
    kept = run(make([[(0, 2), (5000, 2)], [(500, 2)], [(1000, 2)]], shared=4), SessionKv(release="end"))
    assert (kept.timeline.cached_tokens_first // BLOCK).tolist() == [0, 10, 4, 4]
    assert done(kept)["dropped_blocks"] == 6 + 6 + 10


def test_a_session_that_sleeps_too_long_is_forgotten() -> None:
    workload = make([[(0, 2), (100, 2), (3000, 2)]])
    found = run(workload, SessionKv(release_after_s=1))
    assert hits(found, workload) == [10, 0]


def test_dropped_blocks_that_another_request_uses_stay() -> None:
    workload = make([[(0, 30)], [(20, 300), (0, 2)]], shared=10)
    found = run(workload, SessionKv(release="end"), engine=msgspec.structs.replace(ENGINE, num_gpu_blocks=80))
    assert hits(found, workload) == [10]  # the other session ended while this one ran on the same blocks


def test_an_offloaded_session_waits_for_no_copy_when_its_blocks_are_needed() -> None:
    workload = make([[(0, 2)], *[[(1000 + 200 * one, 2)] for one in range(5)]])
    late = run(workload, tiers=TIERS)
    early = run(workload, SessionKv(offload_after_s=0.1), tiers=TIERS)
    assert late.timeline.tiers is not None
    assert early.timeline.tiers is not None
    assert done(early)["offloaded_blocks"] > 0
    assert early.timeline.tiers.room_wait_ns.sum() < late.timeline.tiers.room_wait_ns.sum()


@pytest.mark.parametrize("prefetch", ["told", "predicted"])
def test_a_prefetched_session_finds_its_blocks_on_the_device(prefetch: Any) -> None:
    turns = [(0, 2), *[(2000, 2)] * 5]
    others = [[(400 + 1000 * one, 2)] for one in range(12)]
    more = [[(500 + 1000 * one, 2)] for one in range(12)]
    yet = [[(600 + 1000 * one, 2)] for one in range(12)]
    again = [[(700 + 1000 * one, 2)] for one in range(12)]
    workload = make([turns, *others, *more, *yet, *again])
    kv = SessionKv(offload_after_s=0, prefetch=prefetch, prefetch_lead_s=0.2)
    before = run(workload, SessionKv(offload_after_s=0), tiers=TIERS)
    after = run(workload, kv, tiers=TIERS)
    row = np.flatnonzero(workload.turn == 5)[0]
    assert before.timeline.tiers is not None
    assert after.timeline.tiers is not None
    assert before.timeline.tiers.below_tokens_first[0][row] == 10 * BLOCK
    assert after.timeline.tiers.below_tokens_first[0][row] == 0
    assert after.timeline.cached_tokens_first[row] == 10 * BLOCK
    assert done(after)["prefetches"] > 0


def test_a_session_is_predicted_by_its_own_gaps_and_then_doubled() -> None:
    gaps = GapPredictor()
    assert gaps.predict_s(1, 0) is None
    for gap_s in (4.0, 10.0, 6.0):
        gaps.learn(1, gap_s)
    assert gaps.predict_s(1, 0) == 6
    assert gaps.predict_s(1, 7) == 12
    assert gaps.predict_s(2, 0) is None  # too few of all
    for gap_s in (1.0,) * 8:
        gaps.learn(3, gap_s)
    assert gaps.predict_s(2, 0) == 1
    assert gaps.predict_s(2, 4000) is None


class Recorder:
    """A user-defined policy: holds what it is asked about, and asks to be called once more."""

    seen: ClassVar[list[tuple[int, int, bool, int | None]]] = []

    def on_sleep(self, sleep: SessionSleep) -> Keep:
        """Record the call."""
        self.seen.append((sleep.row, sleep.asleep_ns, sleep.is_last, sleep.told_ns))
        if sleep.asleep_ns:
            return Keep(["unhold"])
        return Keep(["hold"], 0.25)


def test_a_session_sleeps_once_none_of_its_requests_is_open() -> None:
    asked: list[tuple[int, int]] = []

    class Watch:
        """Notes for which request it is asked, and when."""

        def on_sleep(self, sleep: SessionSleep) -> Keep:
            asked.append((sleep.row, sleep.now_ns))
            return Keep([])

    workload = make_plays(DIAMOND, [0] * 4, session=np.zeros(4, np.int32), turn=np.arange(4, dtype=np.int32))
    timeline = run(workload, SessionKv(policy=Watch), load=Plays(clock="recorded")).timeline
    spans = list(zip(timeline.arrival_ns.tolist(), timeline.finish_ns.tolist(), strict=True))
    alone = [
        (row, end)
        for row, (_, end) in enumerate(spans)
        if not any(first <= end < last for first, last in spans)
    ]
    assert len(alone) < 4
    assert asked == sorted(alone, key=lambda one: one[1])


def test_a_policy_of_the_users_is_asked_at_each_sleep_and_when_it_wants() -> None:
    Recorder.seen = []
    run(make([[(0, 2), (1000, 2)]]), SessionKv(policy=Recorder), check=False)
    assert Recorder.seen == [
        (0, 0, False, 10**9),
        (0, 250_000_000, False, 10**9),
        (1, 0, True, None),
    ]


def test_a_policy_file_is_loaded_by_its_class(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Mine:\n    def on_sleep(self, sleep):\n        return ([] if sleep.is_last else ['hold'], None)\n",
        encoding="utf-8",
    )
    workload = make(CROWD)
    assert hits(run(workload, SessionKv(policy=f"{file}:Mine")), workload) == [10]
    with pytest.raises(ConfigError, match="no class Other"):
        run(workload, SessionKv(policy=f"{file}:Other"))


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (("hold",), "must return Keep"),
        ((["steal"], None), "'steal' is no action"),
        ((["hold"], -1), "again_s must be above 0"),
        (None, "must return Keep"),
    ],
)
def test_wrong_answers_of_a_policy_are_named(answer: Any, problem: str) -> None:
    class Wrong:
        def on_sleep(self, _sleep: SessionSleep) -> Any:
            return answer

    with pytest.raises(PolicyError, match=problem):
        run(make([[(0, 2)]]), SessionKv(policy=Wrong))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "nothing is set"),
        ({"hold_s": -1}, "hold_s must be a time"),
        ({"prefetch_lead_s": 2.0, "hold_s": 3.0}, "no effect without prefetch"),
        ({"hold_s": 9.0, "release_after_s": 3.0}, "within hold_s"),
        ({"policy": Recorder, "hold_s": 9.0}, "leave it or policy out"),
        ({"policy": 5}, "must be FILE.py:CLASS"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SessionKv(**settings)


def test_fleets_that_keep_nothing_for_sessions_are_refused() -> None:
    workload = make([[(0, 2), (100, 2)]])
    with pytest.raises(ConfigError, match="prefetch needs a tier"):
        run(workload, SessionKv(prefetch="told"))
    with pytest.raises(ConfigError, match="without prefix caching"):
        run(
            workload,
            SessionKv(hold_s=1),
            engine=msgspec.structs.replace(ENGINE, enable_prefix_caching=False),
            check=False,
        )


def test_sub_agents_go_to_the_worker_of_the_session_that_started_them() -> None:
    from replay.test_plays import make as make_plays
    from replay.test_plays import play

    graph = make_plays([(1, 0, 0, 5), (2, 0, 0, 6), (3, 1, 1, 0)], [0, 0, 0, 0, 1, 2])
    sessions = np.array([0, 1, 2, 1, 3, 4], np.int32)
    workload = replace(graph, session=sessions, turn=np.array([0, 0, 0, 1, 0, 0], np.int32))
    tree = play(workload, workers=3, routing="session_tree").worker
    assert len(set(tree[:4].tolist())) == 1
    assert len(set(tree.tolist())) == 3
    apart = play(workload, workers=3, routing="session_affinity").worker
    assert len(set(apart[:3].tolist())) > 1

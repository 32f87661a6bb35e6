"""Requests that wait in the router while every worker has enough to compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, WrongState
from understudy.router import KvRouter, KvRouting, Router
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import Workload
from understudy.workload.families import FanOut

BLOCK = 64
BATCH = 1024


def router(workers: int = 2, **settings: Any) -> KvRouter:
    made = KvRouting(queue_threshold=settings.pop("queue_threshold", 1.0), **settings).build(0)
    made.begin(workers, BATCH)
    return made


def ask(
    who: KvRouter, row: int, tokens: int, now_ms: float = 0, first: int | None = None, **more: int
) -> int | None:
    start = 10_000 * row if first is None else first
    return who.decide(row, list(range(start, start + tokens // BLOCK)), tokens, BLOCK, now_ms, **more)


def drain(who: KvRouter, now_ms: float = 0) -> list[int]:
    rows = []
    while (released := who.release(now_ms)) is not None:
        rows.append(released[0])
    return rows


def test_a_worker_is_busy_beyond_the_threshold_and_not_at_it() -> None:
    who = router(1)
    assert ask(who, 0, BATCH) == 0  # 1024 tokens before it: not above 1 × 1024
    assert ask(who, 1, 64) == 0
    assert ask(who, 2, 64) is None
    assert who.waiting == 1


def test_nobody_waits_while_one_worker_is_free_nor_without_a_threshold() -> None:
    who = router(2)
    assert ask(who, 0, 2 * BATCH) != ask(who, 1, 64)
    plain = router(1, queue_threshold=None)
    assert [ask(plain, row, 5 * BATCH) for row in range(4)] == [0] * 4
    assert plain.release(0) is None


def test_a_first_token_makes_room_and_so_does_an_end() -> None:
    who = router(1, queue_threshold=0.0)
    ask(who, 0, 64)
    assert (ask(who, 1, 64), ask(who, 2, 64)) == (None, None)
    assert drain(who) == []
    who.first_token(0)
    assert drain(who) == [1]  # which makes it busy again
    who.ended(1)
    assert drain(who) == [2]


def test_a_backlog_is_not_overtaken_by_who_comes_later() -> None:
    who = router(2)
    ask(who, 0, 2 * BATCH)
    ask(who, 1, 2 * BATCH)
    assert ask(who, 2, 64) is None
    who.first_token(0)
    assert ask(who, 3, 64) is None  # a worker is free, but row 2 has not gone yet
    assert drain(who) == [2, 3]


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [1, 2, 3]), ("lcfs", [3, 2, 1]), ("wspt", [2, 3, 1])])
def test_the_policy_says_who_goes_first(policy: str, order: list[int]) -> None:
    who = router(1, queue_policy=policy)
    ask(who, 0, 2 * BATCH)
    for row, tokens in ((1, 896), (2, 64), (3, 256)):
        assert ask(who, row, tokens, now_ms=row) is None
    who.first_token(0)
    assert drain(who, 10.0) == order


def test_what_is_cached_need_not_be_computed_and_counts_as_of_the_arrival() -> None:
    who = router(1, queue_policy="wspt")
    ask(who, 0, 2 * BATCH)
    who.index.store(0, np.arange(500, 514, dtype=np.uint64))
    assert ask(who, 1, 896, first=500) is None  # all of its 14 blocks are there
    assert ask(who, 2, 128) is None
    who.index.clear(0)
    who.first_token(0)
    assert drain(who) == [1, 2]
    assert who.last.overlap_blocks == 0
    assert who.decisions.overlap_blocks.tolist() == [0, 14, 0]


def test_priorities_are_seconds_weights_or_walls() -> None:
    for policy, order in (("fcfs", [2, 1]), ("lcfs", [2, 1]), ("wspt", [2, 1])):
        who = router(1, queue_policy=policy)
        ask(who, 0, 2 * BATCH)
        ask(who, 1, 128, now_ms=0)
        ask(who, 2, 128, now_ms=1500, priority=2)  # two seconds, or three times the weight
        who.first_token(0)
        assert drain(who, 2000) == order
    late = router(1)
    ask(late, 0, 2 * BATCH)
    ask(late, 1, 128, now_ms=0)
    ask(late, 2, 128, now_ms=2500, priority=2)
    ask(late, 3, 128, now_ms=9000, strict_priority=1)
    ask(late, 4, 128, now_ms=0, priority=-7)  # below none there is none
    late.first_token(0)
    assert drain(late, 9000) == [3, 1, 4, 2]
    assert late.decisions.waited_ns.tolist() == [0, 0, 9_000_000_000, 9_000_000_000, 6_500_000_000]


def test_who_goes_while_it_waits_is_forgotten() -> None:
    who = router(1)
    ask(who, 0, 2 * BATCH)
    ask(who, 1, 64)
    ask(who, 2, 64)
    who.ended(1)
    assert who.waiting == 1
    who.ended(0)
    assert drain(who) == [2]
    who.ended(2)
    assert not who.prefill_tokens.any()
    assert not who.active_blocks.any()


def test_workers_come_and_go() -> None:
    who = router(1, queue_threshold=None)
    who.set_available(0, False)
    with pytest.raises(WrongState, match="no worker"):
        ask(who, 0, 64)
    assert who.add_worker(BATCH) == 1
    assert [ask(who, row, 640) for row in range(1, 4)] == [1, 1, 1]
    who.index.store(0, np.arange(5))
    who.set_available(0, True)
    assert ask(who, 4, 640) == 0
    assert np.isfinite(who.costs).all()
    who.forget(0)
    assert who.index.num_blocks(0) == 0


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="queue_threshold"):
        router(queue_threshold=-1.0)
    with pytest.raises(ConfigError, match="one of fcfs, lcfs, wspt"):
        router(queue_policy="best")


# ── In a replay ──

ENGINE = VllmConfig(block_size=64, num_gpu_blocks=2048, max_num_batched_tokens=2048)
CROWD = FanOut(contexts=30, context_interval_ms=150.0, seed=5).build()


def play(workload: Workload = CROWD, **settings: Any) -> Any:
    return run_offline(RunPlan(workload, ENGINE, workers=3, routing=KvRouting(**settings), check=True))


def test_a_replay_lets_requests_wait_and_loses_none() -> None:
    run = play(queue_threshold=1.0)
    assert run.decisions is not None
    waited = run.decisions.waited_ns
    assert (waited > 0).sum() > 10
    assert sorted(run.decisions.rows.tolist()) == list(range(len(CROWD)))
    assert (run.timeline.finish_ns > 0).all()
    admitted = run.timeline.first_admit_ns - run.timeline.arrival_ns
    assert (admitted[run.decisions.rows] >= waited).all()
    again = play(queue_threshold=1.0)
    assert again.facts.digest == run.facts.digest


def test_who_is_let_go_is_judged_by_what_workers_hold_by_then_checked_or_not() -> None:
    settings = KvRouting(queue_threshold=0.0, event_delay_ms=20)
    plain, checked = (
        run_offline(RunPlan(CROWD, ENGINE, workers=3, routing=settings, check=check)).decisions
        for check in (False, True)
    )
    assert plain is not None
    assert checked is not None
    assert (plain.waited_ns > 0).sum() > 10
    for column in plain.__struct_fields__:
        mine, theirs = getattr(plain, column), getattr(checked, column)
        assert np.array_equal(mine, theirs) if isinstance(mine, np.ndarray) else mine == theirs, column


def test_requests_of_a_step_start_and_end_one_by_one_and_let_others_go_in_between() -> None:
    # The first ends in the step in which the second has its first token; the third, which that lets go, finds the
    # blocks of the second alone. And one whose first token is its last is gone at once.
    engine = VllmConfig(block_size=BLOCK, num_gpu_blocks=100, async_scheduling=False)
    for outputs, cost in (([2, 5, 1], 3.0), ([1, 5, 1], 3.0), ([3, 5, 1], 4.0)):
        workload = Workload(
            arrival_ns=np.zeros(3, np.int64),
            prompt_tokens=np.full(3, BLOCK, np.int32),
            output_tokens=np.array(outputs),
            hash_offsets=np.arange(4),
            hash_ids=np.arange(3, dtype=np.uint32),
            trace_block_size=BLOCK,
        )
        run = run_offline(RunPlan(workload, engine, routing=KvRouting(queue_threshold=0.0)))
        assert run.decisions is not None
        assert run.decisions.rows.tolist() == [0, 1, 2]
        assert (
            run.decisions.cost[2] == cost
        )  # its own block to compute and to hold, and those that are held there


def test_a_threshold_that_nobody_reaches_changes_nothing() -> None:
    assert play(queue_threshold=1e9).facts.digest == play().facts.digest


def test_the_shortest_first_serves_the_mean_and_the_last_first_does_not() -> None:
    rng = np.random.default_rng(3)
    prompts = rng.choice([64, 128, 4096], size=120)
    blocks = -(-prompts // 64)
    workload = Workload(  # two bursts of short and long prompts, nothing shared
        arrival_ns=np.repeat([0, 400_000_000], 60),
        prompt_tokens=prompts.astype(np.int32),
        output_tokens=np.full(120, 4),
        hash_offsets=np.concatenate([[0], np.cumsum(blocks)]),
        hash_ids=np.arange(blocks.sum(), dtype=np.uint32),
        trace_block_size=64,
    )
    means = {}
    for policy in ("fcfs", "lcfs", "wspt"):
        run = play(workload, queue_threshold=0.5, queue_policy=policy)
        means[policy] = float((run.timeline.first_token_ns - run.timeline.arrival_ns).mean())
    assert means["wspt"] < 0.8 * means["fcfs"]
    assert means["wspt"] < means["lcfs"]


class Listener(Router):
    """Round robin that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def choose(self, request: Any, view: Any) -> int:
        self.told.append(("asked", request.row))
        return int(request.row % len(view))

    def first_token(self, row: int) -> None:
        self.told.append(("first", row))

    def ended(self, row: int) -> None:
        self.told.append(("ended", row))


def test_a_router_in_python_is_told_of_first_tokens_and_ends() -> None:
    who = Listener()
    run_offline(RunPlan(CROWD, ENGINE, workers=3, routing=who))
    for row in range(len(CROWD)):
        places = [who.told.index((what, row)) for what in ("asked", "first", "ended")]
        assert places == sorted(places)
    assert len(who.told) == 3 * len(CROWD)

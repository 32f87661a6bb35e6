"""A scheduler and an executor on the manager: waiting, rejection, failure at every beat."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kv.request_building import BLOCK, LAYOUT, assert_idle, assert_sound, greedy, prefill, prompt, snapshot
from kv.request_engine import Executor, Injected, Job, Scheduler
from model.side_by_side import DUPLICATES, DuplicatesName
from understudy.kv import KvCacheManager

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def engine(
    blocks: int, *, context_window: int = 10_000, chunk: int = 10_000, duplicates: DuplicatesName = "allow"
) -> Iterator[Scheduler]:
    """With `blocks` blocks for requests; at the end every one of them is back."""
    with KvCacheManager(blocks + 1, LAYOUT, duplicates=duplicates) as manager:
        yield Scheduler(Executor(manager), context_window, chunk)
        assert_idle(manager)


# --- admission ------------------------------------------------------------------------------------


def test_the_last_token_is_said_but_never_written() -> None:
    with KvCacheManager(8, LAYOUT) as manager, manager.request(prompt(16), 3) as kv:
        assert manager.lifetime_blocks(16, 1) == 1
        assert manager.lifetime_blocks(16, 3) == 2  # 18 tokens are written
        prefill(kv)
        assert (kv.computed_tokens, manager.future_blocks([kv])) == (16, 1)
        for computed in (17, 18):
            kv.schedule_decode()
            kv.apply_decode(1)
            assert (kv.computed_tokens, manager.future_blocks([kv])) == (computed, 0)
        assert kv.finished


def test_one_token_on_a_boundary_runs_in_a_pool_of_one_block() -> None:
    with engine(1) as scheduler:
        job = Job("a", prompt(16), 1)
        scheduler.submit(job)
        scheduler.run()
        assert job.events == ["length after 1"]
        assert job.tokens == greedy(prompt(16), 1)
        assert scheduler.executor.log == ["add a", "drop a"]


def test_a_request_waits_until_the_whole_life_of_another_leaves_room() -> None:
    with engine(4) as scheduler:
        first, second = Job("first", prompt(16), 18), Job("second", prompt(17, seed=2), 1)
        scheduler.submit(first, second)
        scheduler.turn()
        assert scheduler.executor.manager.available_blocks == 3  # free now, but promised
        assert scheduler.waiting == [second]
        scheduler.run()
        assert scheduler.executor.log == ["add first", "drop first", "add second", "drop second"]
        assert (first.tokens, second.tokens) == (greedy(first.prompt, 18), greedy(second.prompt, 1))


def test_a_request_that_can_never_fit_is_rejected_and_the_next_one_runs() -> None:
    with engine(2) as scheduler:
        big, small = Job("big", prompt(16), 34), Job("small", prompt(16), 1)
        scheduler.submit(big, small)
        scheduler.run()
        assert big.events == ["rejected: 16 prompt tokens, 0 said, never fits"]
        assert small.events == ["length after 1"]
        assert scheduler.executor.log == ["add small", "drop small"]


def test_the_context_window_is_a_rule_of_its_own() -> None:
    with engine(100, context_window=64) as scheduler:
        long, short = Job("long", prompt(60), 5), Job("short", prompt(60), 4)
        scheduler.submit(long, short)
        scheduler.run()
        assert long.events == ["rejected: 60 + 5 tokens pass the context window"]
        assert short.events == ["length after 4"]


def test_a_small_request_may_pass_a_big_one() -> None:
    with engine(4) as scheduler:
        jobs = [Job("running", prompt(16), 18), Job("big", prompt(33, 2), 1), Job("small", prompt(16, 3), 1)]
        scheduler.submit(*jobs)
        scheduler.run()
        assert scheduler.executor.log == [
            "add running",
            "add small",
            "drop small",
            "drop running",
            "add big",
            "drop big",
        ]


def test_the_cache_never_stands_in_the_way_of_admission() -> None:
    with engine(4) as scheduler:
        for seed in range(1, 6):
            job = Job("a", prompt(40, seed=seed), 25)
            scheduler.submit(job)
            scheduler.run()
            assert job.tokens == greedy(job.prompt, 25)
        assert scheduler.executor.manager.blocks.metrics().evictions == 16


def test_a_closed_request_needs_no_more_blocks() -> None:
    with KvCacheManager(4, LAYOUT) as manager:
        kv = manager.request(prompt(16), 20)
        assert (manager.future_blocks([kv]), manager.can_admit(16, 20, [kv])) == (3, False)
        kv.close()
        assert (manager.future_blocks([kv]), manager.can_admit(16, 20, [kv])) == (0, True)


# --- failure --------------------------------------------------------------------------------------


def test_a_failed_decode_ends_one_request_and_the_next_is_served() -> None:
    with engine(8) as scheduler:

        def fail(beat: str, _index: int) -> None:
            if beat == "run":
                raise Injected("the device fell over")

        unlucky = Job("unlucky", prompt(20), 5)
        scheduler.submit(unlucky)
        scheduler.turn()
        scheduler.executor.fail = fail
        scheduler.turn()
        assert unlucky.events == ["error after 1: the device fell over"]
        scheduler.executor.fail = lambda _beat, _index: None
        lucky = Job("lucky", prompt(20), 5)
        scheduler.submit(lucky)
        scheduler.run()
        assert lucky.tokens == greedy(lucky.prompt, 5)


@pytest.mark.parametrize("turns", [1, 3])
def test_a_client_that_goes_away_is_dropped_at_the_next_turn(turns: int) -> None:
    with engine(8, chunk=8) as scheduler:
        job = Job("a", prompt(20), 5)
        scheduler.submit(job)
        for _ in range(turns):
            scheduler.turn()
        job.gone = True
        scheduler.turn()
        assert job.events == [f"gone after {turns // 3}"]
        assert_idle(scheduler.executor.manager)


BEATS = ["schedule", "view", "run", "apply"]


@pytest.mark.parametrize("duplicates", DUPLICATES)
@pytest.mark.parametrize("culprit", range(5))
@pytest.mark.parametrize("beat", BEATS)
def test_a_failure_at_any_beat_harms_only_its_own_request(
    beat: str, culprit: int, duplicates: DuplicatesName
) -> None:
    """A mixed step: two decodes (one onto a new page), a chunk, a whole prompt, and the twin of another."""
    with engine(40, duplicates=duplicates) as scheduler:
        executor = scheduler.executor
        manager = executor.manager
        jobs = [
            Job("decode", prompt(20, 1), 9),
            Job("boundary", prompt(32, 2), 9),
            Job("chunk", prompt(50, 3), 9),
            Job("whole", prompt(40, 4), 9),
            Job("twin", prompt(20, 1), 9),
        ]
        scheduler.active = list(jobs)
        for job in jobs:
            executor.add(job)
        executor.step({"decode": 20, "boundary": 32, "chunk": 21})
        chunks = {"decode": 0, "boundary": 0, "chunk": 22, "whole": 40, "twin": 20}
        before = {name: snapshot(kv) for name, kv in executor.requests.items()}
        available = manager.available_blocks

        def fail(at: str, index: int) -> None:
            if (at, index) == (beat, culprit):
                raise Injected(f"{beat} {culprit}")

        executor.fail = fail
        name = jobs[culprit].name
        own = executor.requests[name].held_blocks
        done, failed = executor.step(chunks)
        executor.fail = lambda _beat, _index: None

        assert failed == {name: f"{beat} {culprit}"}
        assert name not in executor.requests
        assert_sound(manager, executor.requests.values())
        if beat == "apply":
            assert done == [job.name for job in jobs if job.name != name]
        else:
            assert done == []
            assert {n: snapshot(kv) for n, kv in executor.requests.items()} == {
                n: state for n, state in before.items() if n != name
            }
            assert manager.available_blocks == available + own
        scheduler.active = [job for job in jobs if job.name != name]
        scheduler.run()
        for job in jobs:
            if job.name != name:
                assert job.tokens == greedy(job.prompt, 9)


def test_a_pool_that_runs_dry_in_the_middle_of_a_batch_gives_back_what_the_batch_took() -> None:
    with engine(6) as scheduler:
        executor = scheduler.executor
        jobs = [Job(f"{seed}", prompt(2 * BLOCK, seed), 1) for seed in range(1, 5)]
        scheduler.active = list(jobs)
        for job in jobs:
            executor.add(job)
        done, failed = executor.step({job.name: 2 * BLOCK for job in jobs})  # admission was never asked
        assert (done, list(failed)) == ([], ["4"])
        assert failed["4"].startswith("asked for 2 blocks of tier G1 but only 0 of 7")
        assert executor.manager.available_blocks == 6
        scheduler.active = jobs[:3]
        scheduler.run()
        assert [job.events for job in jobs] == [["length after 1"]] * 3 + [[]]

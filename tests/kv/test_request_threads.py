"""Threads: a request belongs to one at a time, a manager to all."""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import pytest

from eviction.strict import StrictLru
from kv.request_building import (
    ANY,
    BLOCK,
    LAYOUT,
    Memory,
    assert_idle,
    decode,
    greedy,
    output,
    prefill,
    prompt,
    run,
    snapshot,
)
from model.side_by_side import DUPLICATES, DuplicatesName
from threads import run_together, switching_every
from understudy.errors import CapacityExhausted, WrongState
from understudy.kv import KvCacheManager, RequestKv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CALLS: dict[str, Callable[[RequestKv], object]] = {
    "match_prefix": lambda kv: kv.match_prefix(),
    "schedule_prefill": lambda kv: kv.schedule_prefill(1),
    "schedule_decode": lambda kv: kv.schedule_decode(),
    "schedule_speculative": lambda kv: kv.schedule_speculative(2),
    "view_ahead": lambda kv: kv.view_ahead(),
    "revert": lambda kv: kv.revert(),
    "view": lambda kv: kv.view(),
    "apply_prefill": lambda kv: kv.apply_prefill(ANY),
    "apply_decode": lambda kv: kv.apply_decode(ANY),
    "apply_speculative": lambda kv: kv.apply_speculative([ANY]),
    "preempt": lambda kv: kv.preempt(),
    "close": lambda kv: kv.close(),
    "the end of with": lambda kv: kv.__exit__(None, None, None),
    "state": lambda kv: kv.state,
    "tokens": lambda kv: kv.tokens,
    "computed_tokens": lambda kv: kv.computed_tokens,
    "held_blocks": lambda kv: kv.held_blocks,
}


def test_a_second_thread_in_the_middle_of_a_call_is_told_and_changes_nothing() -> None:
    policy = StrictLru()
    told: dict[str, str] = {}
    inside, done = threading.Event(), threading.Event()
    with KvCacheManager(8, LAYOUT, policy=policy) as manager, manager.request(prompt(40), 3) as kv:

        def wait_inside(name: str) -> None:
            if name == "select" and not done.is_set():
                inside.set()
                assert done.wait(60)

        def other() -> None:
            assert inside.wait(60)
            try:
                for name, call in CALLS.items():
                    with pytest.raises(WrongState) as raised:
                        call(kv)
                    told[name] = str(raised.value)
            finally:
                done.set()

        policy.hook = wait_inside
        run_together(lambda: kv.schedule_prefill(40), other)
        policy.hook = lambda _name: None
        assert told == dict.fromkeys(
            CALLS, "this request is in the middle of a call from another thread or policy: one at a time"
        )
        assert (kv.state, kv.held_blocks, kv.computed_tokens) == ("prefill_scheduled", 3, 0)
        kv.apply_prefill(ANY)
        run(kv)
        kv.close()
        assert_idle(manager)


def test_threads_that_fight_over_one_request_lose_nothing() -> None:
    """Each token goes in once, whoever brings it; what a thread is refused leaves no trace."""
    budget = 3000
    with KvCacheManager(300, LAYOUT) as manager, manager.request(prompt(1000), budget) as kv:
        prefill(kv)
        applied: list[int] = []
        refused: list[str] = []

        def fight(own_tokens: Iterator[int]) -> None:
            while True:
                try:
                    if kv.finished:
                        return
                    kv.schedule_decode()
                except WrongState as error:
                    refused.append(str(error))
                    time.sleep(0)
                    continue
                # The step is this thread's: the others find the request scheduled, and leave it alone.
                applied.append(token := next(own_tokens))
                time.sleep(0)
                kv.apply_decode(token)

        run_together(*(partial(fight, count(start)) for start in range(10_000, 50_000, 10_000)))
        assert output(kv) == [ANY, *applied]
        assert kv.held_blocks == manager.lifetime_blocks(1000, budget)
        assert refused


def test_a_long_call_lets_other_threads_go_on() -> None:
    tokens = np.arange(1_000_000, dtype=np.uint32)
    progress: list[None] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            progress.append(None)
            time.sleep(0)

    moved: dict[str, bool] = dict.fromkeys(["request", "schedule", "apply", "match"], False)
    with KvCacheManager(len(tokens) // BLOCK + 2, LAYOUT) as manager, switching_every(1e6):
        thread = threading.Thread(target=work, daemon=True)
        thread.start()

        def watched(name: str, call: Callable[[], object]) -> None:
            before = len(progress)
            call()
            moved[name] |= len(progress) > before

        for _ in range(50):
            requests: list[RequestKv] = []
            watched("request", lambda: requests.append(manager.request(tokens, 1)))  # noqa: B023
            with requests[0] as kv:
                watched("match", kv.match_prefix)
                left = len(tokens) - kv.computed_tokens
                watched("schedule", partial(kv.schedule_prefill, left))
                watched("apply", partial(kv.apply_prefill, ANY))
            manager.blocks.clear_inactive()
            with manager.request(tokens[: 500 * BLOCK], 1) as kv:
                prefill(kv)
            if all(moved.values()):
                break
        stop.set()
        thread.join(60)
    assert moved == dict.fromkeys(moved, True)


def serve(manager: KvCacheManager, memory: Memory, seed: int, rounds: int) -> None:
    """Requests of a few shared prompts, each checked word for word; when the pool is full they start over."""
    rng = random.Random(seed)
    for _ in range(rounds):
        length, budget = rng.randint(1, 50), rng.randint(1, 30)
        tokens = prompt(length, rng.choice([1, 2]))
        with manager.request(tokens, budget) as kv:
            kv.match_prefix()
            while not kv.finished:
                try:
                    if kv.computed_tokens < kv.prefill_target:
                        prefill(kv, memory, chunk=rng.randint(1, 40))
                    else:
                        decode(kv, memory)
                except CapacityExhausted:
                    kv.preempt()
                    time.sleep(0)
                    kv.match_prefix()
                if rng.random() < 0.02:
                    break
            said = output(kv)
            assert said == greedy(tokens, len(said))


@pytest.mark.parametrize("policy", ["lru", "lineage", "vllm", "python"])
@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_many_threads_with_requests_of_their_own_share_one_manager(
    policy: str, duplicates: DuplicatesName
) -> None:
    chosen = StrictLru() if policy == "python" else policy
    memory = Memory()
    # Room for any one of them at its longest, but not for all: the others wait and come again.
    with KvCacheManager(13, LAYOUT, policy=chosen, duplicates=duplicates) as manager:  # type: ignore[arg-type]
        run_together(*(partial(serve, manager, memory, seed, 30) for seed in range(4)))
        assert manager.blocks.metrics().match_blocks_returned > 0
        assert_idle(manager)


def test_closing_by_many_threads_closes_once() -> None:
    with KvCacheManager(64, LAYOUT) as manager:
        for seed in range(30):
            kv = manager.request(prompt(40 * BLOCK, seed + 1), 2)
            kv.schedule_prefill(40 * BLOCK)

            def close(kv: RequestKv = kv) -> None:
                while True:
                    try:
                        return kv.close()
                    except WrongState:  # another thread is at it
                        time.sleep(0)

            run_together(*[close] * 4)
            assert (snapshot(kv)["state"], kv.held_blocks) == ("closed", 0)
            assert_idle(manager)

"""Steps that are undone, preempted or speculative."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kv.request_building import (
    ANY,
    BLOCK,
    LAYOUT,
    Memory,
    assert_idle,
    assert_sound,
    decode,
    greedy,
    output,
    prefill,
    prompt,
    run,
    snapshot,
)
from understudy.errors import CapacityExhausted, WrongState
from understudy.kv import KvCacheManager, RequestKv

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def manager() -> Iterator[KvCacheManager]:
    with KvCacheManager(32, LAYOUT) as manager:
        yield manager
        assert_idle(manager)


# --- revert ---------------------------------------------------------------------------------------

SCHEDULES: dict[str, tuple[int, Callable[[RequestKv], object]]] = {
    "the first prefill": (0, lambda kv: kv.schedule_prefill(40)),
    "a chunk in the middle": (20, lambda kv: kv.schedule_prefill(20)),
    "a chunk inside one block": (20, lambda kv: kv.schedule_prefill(3)),
    "a decode inside a block": (40, lambda kv: kv.schedule_decode()),
    "a decode on a boundary": (48, lambda kv: kv.schedule_decode()),
    "speculation": (48, lambda kv: kv.schedule_speculative(20)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_revert_undoes_the_schedule_and_nothing_else(manager: KvCacheManager, name: str) -> None:
    computed, schedule = SCHEDULES[name]
    memory = Memory()
    tokens = prompt(max(40, computed))
    with manager.request(tokens, 30) as kv:
        while kv.computed_tokens < computed:
            kv.schedule_prefill(min(20, len(tokens) - kv.computed_tokens))
            sampled = memory.forward(kv)[-1]
            kv.apply_prefill(sampled if kv.view().seq_len == len(tokens) else None)
        before = snapshot(kv), manager.available_blocks
        for _ in range(2):
            schedule(kv)
            assert_sound(manager, [kv])
            kv.revert()
            assert (snapshot(kv), manager.available_blocks) == before
            assert_sound(manager, [kv])
        with pytest.raises(WrongState, match="revert needs a scheduled step"):
            kv.revert()
        assert run(kv, memory) == greedy(tokens, 30)


def test_revert_keeps_the_matched_prefix(manager: KvCacheManager) -> None:
    with manager.request(prompt(40), 1) as kv:
        prefill(kv)
    with manager.request(prompt(40), 1) as kv:
        assert kv.match_prefix() == 32
        kv.schedule_prefill(8)
        kv.revert()
        assert (kv.held_blocks, kv.computed_tokens, kv.cached_tokens) == (2, 32, 32)


# --- preempt and resume ---------------------------------------------------------------------------


@pytest.mark.parametrize("generated", [1, 2, 9, 10, 25, 26, 40])
def test_a_preempted_request_goes_on_where_it_was(manager: KvCacheManager, generated: int) -> None:
    memory = Memory()
    with manager.request(prompt(24), 41) as kv:
        prefill(kv, memory)
        while kv.generated_tokens < generated:
            decode(kv, memory)
        computed = kv.computed_tokens
        kv.preempt()
        assert (kv.state, kv.held_blocks, manager.available_blocks) == ("idle", 0, 31)
        assert (kv.computed_tokens, kv.cached_tokens, kv.registered_blocks) == (0, 0, 0)
        assert (kv.prefill_target, kv.generated_tokens) == (24 + generated, generated)
        # Generated blocks match as well, up to the last one that was computed.
        assert kv.match_prefix() == computed // BLOCK * BLOCK == kv.computed_tokens
        assert_sound(manager, [kv])
        assert run(kv, memory, chunk=5) == greedy(prompt(24), 41)


def test_a_preempted_request_whose_blocks_were_evicted_computes_them_again() -> None:
    memory = Memory()
    with KvCacheManager(6, LAYOUT) as manager:
        with manager.request(prompt(24), 40) as kv:
            prefill(kv, memory)
            while kv.generated_tokens < 20:
                decode(kv, memory)
            kv.preempt()
            with manager.request(prompt(64, seed=2), 1) as other:  # takes four of the five
                prefill(other, memory)
            assert kv.match_prefix() < 32
            assert run(kv, memory, chunk=7) == greedy(prompt(24), 40)
        assert_idle(manager)


def test_a_request_can_be_preempted_in_the_middle_of_its_prefill_and_more_than_once(
    manager: KvCacheManager,
) -> None:
    memory = Memory()
    rng = random.Random(3)
    for seed in range(20):
        with manager.request(prompt(50, seed=seed + 1), 30) as kv:
            while not kv.finished:
                if kv.computed_tokens < kv.prefill_target:
                    kv.schedule_prefill(rng.randint(1, kv.prefill_target - kv.computed_tokens))
                    sampled = memory.forward(kv)[-1]
                    done = kv.view().seq_len == kv.prefill_target
                    kv.apply_prefill(sampled if done else None)
                else:
                    decode(kv, memory)
                if rng.random() < 0.1 and not kv.finished:
                    kv.preempt()
                    if rng.random() < 0.7:
                        kv.match_prefix()
                assert_sound(manager, [kv])
            assert output(kv) == greedy(prompt(50, seed=seed + 1), 30)


def test_a_scheduled_step_must_be_settled_before_preempting(manager: KvCacheManager) -> None:
    with manager.request(prompt(20), 2) as kv:
        kv.schedule_prefill(20)
        before = snapshot(kv)
        with pytest.raises(WrongState, match="preempt needs a request that is idle"):
            kv.preempt()
        assert snapshot(kv) == before
        kv.revert()
        kv.preempt()


@pytest.mark.parametrize(("length", "budget"), [(16, 1), (20, 13), (15, 2), (16, 0), (30, 35)])
def test_a_finished_request_that_is_preempted_draws_no_more_than_its_lifetime(
    manager: KvCacheManager, length: int, budget: int
) -> None:
    memory = Memory()
    lifetime = manager.lifetime_blocks(length, budget)
    with manager.request(prompt(length), budget) as kv:
        said = run(kv, memory)
        assert kv.held_blocks == lifetime
        kv.preempt()
        assert not kv.finished  # its rows are gone
        assert run(kv, memory) == said  # nothing is sampled again
        assert kv.held_blocks == lifetime


# --- speculation ----------------------------------------------------------------------------------


def speculate(kv: RequestKv, memory: Memory, drafts: list[int]) -> None:
    """Draft, verify, and keep what the model would have said: the right drafts and one token more."""
    rows = kv.schedule_speculative(len(drafts) + 1)
    sampled = memory.forward(kv, drafts)
    right = 0
    while right < rows - 1 and drafts[right] == sampled[right]:
        right += 1
    kv.apply_speculative(sampled[: right + 1])


@pytest.mark.parametrize("right", [0, 1, 3, 17])
def test_speculation_says_what_plain_decoding_says(manager: KvCacheManager, right: int) -> None:
    memory = Memory()
    expected = greedy(prompt(13), 60)
    with manager.request(prompt(13), 60) as kv:
        prefill(kv, memory)
        while not kv.finished:
            said = kv.generated_tokens
            drafts = expected[said : said + right] + [99_999] * 20
            speculate(kv, memory, drafts)
            assert_sound(manager, [kv])
            assert kv.generated_tokens == min(60, said + right + 1)
        assert output(kv) == expected


@pytest.mark.parametrize(
    ("accepted", "held", "registered"), [(0, 1, 0), (1, 1, 1), (2, 2, 1), (17, 2, 2), (18, 3, 2), (40, 4, 3)]
)
def test_blocks_behind_the_accepted_tokens_go_back(
    manager: KvCacheManager, accepted: int, held: int, registered: int
) -> None:
    with manager.request(prompt(15), 60) as kv:
        prefill(kv)
        assert kv.schedule_speculative(40) == 40
        assert (kv.view().seq_len, kv.held_blocks) == (55, 4)
        outcome = kv.apply_speculative([ANY] * accepted)
        assert (kv.held_blocks, kv.registered_blocks, outcome.blocks_registered) == (
            held,
            registered,
            registered,
        )
        assert (kv.computed_tokens, kv.generated_tokens) == (15 + accepted, 1 + accepted)
        assert manager.available_blocks == 31 - held
        assert_sound(manager, [kv])
        kv.schedule_decode()
        assert kv.view().seq_len == 16 + accepted


def test_rejected_drafts_never_reach_the_cache(manager: KvCacheManager) -> None:
    memory = Memory()
    with manager.request(prompt(10), 60) as kv:
        prefill(kv, memory)
        for _ in range(30):
            speculate(kv, memory, [1, 2, 3, 4, 5, 6, 7, 8])
        said = kv.tokens.tolist()
    with manager.request([*said, 1], 20) as again:
        assert again.match_prefix() == 32
        assert run(again, memory) == greedy([*said, 1], 20)


def test_speculation_stays_inside_the_output_budget(manager: KvCacheManager) -> None:
    with manager.request(prompt(16), 5) as kv:
        prefill(kv)
        assert kv.schedule_speculative(1000) == 4
        assert kv.view().seq_len == 20 == 16 + 5 - 1
        assert kv.apply_speculative([ANY] * 4).finished
        assert kv.held_blocks == manager.lifetime_blocks(16, 5) == 2


def test_speculation_of_one_token_is_a_decode(manager: KvCacheManager) -> None:
    memory = Memory()
    with manager.request(prompt(16), 20) as kv:
        prefill(kv, memory)
        while not kv.finished:
            speculate(kv, memory, [])
        assert output(kv) == greedy(prompt(16), 20)


# --- the step behind the one that runs --------------------------------------------------------------


def test_a_view_ahead_is_what_the_next_decode_views(manager: KvCacheManager) -> None:
    memory = Memory()
    with manager.request(prompt(14), 30) as kv:
        prefill(kv, memory)
        kv.schedule_decode()
        while (ahead := kv.view_ahead()) is not None:
            assert kv.view_ahead() == ahead  # to ask twice takes nothing more
            taken = manager.available_blocks
            assert kv.held_blocks == ahead.num_pages
            kv.apply_decode(memory.forward(kv)[-1])
            kv.schedule_decode()
            assert kv.view() == ahead
            assert manager.available_blocks == taken
        assert not kv.apply_decode(memory.forward(kv)[-1]).blocks_registered
        assert kv.finished
        assert output(kv) == greedy(prompt(14), 30)
        assert kv.held_blocks == manager.lifetime_blocks(14, 30)


def test_what_was_taken_ahead_goes_back_with_the_step_or_the_request(manager: KvCacheManager) -> None:
    with manager.request(prompt(15), 30) as kv:
        prefill(kv)
        before = manager.available_blocks
        kv.schedule_decode()
        assert kv.view_ahead() is not None
        assert manager.available_blocks == before - 1
        kv.revert()  # the step that runs
        assert manager.available_blocks == before
        kv.schedule_decode()
        kv.view_ahead()
        kv.apply_decode(ANY)
        assert (kv.held_blocks, manager.available_blocks) == (2, before - 1)
        kv.schedule_decode()
        kv.revert()  # the step that it was taken for
        assert (kv.held_blocks, manager.available_blocks) == (1, before)
        kv.schedule_decode()
        kv.view_ahead()


def test_nothing_is_taken_ahead_of_a_full_pool_or_the_last_token() -> None:
    with KvCacheManager(2, LAYOUT) as small, small.request(prompt(15), 30) as kv:
        prefill(kv)
        kv.schedule_decode()
        with pytest.raises(CapacityExhausted):
            kv.view_ahead()
        assert kv.held_blocks == 1
        assert kv.view().seq_len == 16
    with KvCacheManager(3, LAYOUT) as small, small.request(prompt(15), 2) as kv:
        prefill(kv)
        kv.schedule_decode()
        assert kv.view_ahead() is None
        assert kv.held_blocks == 1

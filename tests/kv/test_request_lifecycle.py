"""The life of a request: its beats, what it shares, what it leaves in the cache and what it gives back."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kv.request_building import (
    ANY,
    BLOCK,
    LAYOUT,
    Memory,
    assert_idle,
    assert_sound,
    decode,
    fill_cache,
    greedy,
    output,
    prefill,
    prompt,
    run,
)
from model.side_by_side import DUPLICATES, DuplicatesName
from understudy.errors import CapacityExhausted, InvalidArgument
from understudy.kv import KvCacheManager, KvViewDesc

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def manager() -> Iterator[KvCacheManager]:
    with KvCacheManager(32, LAYOUT) as manager:
        yield manager


# --- ten scenarios from prefill to release --------------------------------------------------------


def test_a_single_request_from_prefill_to_release(manager: KvCacheManager) -> None:
    assert (manager.total_blocks, manager.available_blocks) == (32, 31)
    with manager.request(prompt(10), 6) as kv:
        assert kv.computed_tokens == 0
        kv.schedule_prefill(10)
        view = kv.view()
        assert (view.seq_len, view.num_pages, view.last_page_len) == (10, 1, 10)
        view.require_capacity(10)
        kv.apply_prefill(ANY)
        assert (kv.computed_tokens, kv.generated_tokens) == (10, 1)
        lengths = []
        while not kv.finished:
            kv.schedule_decode()
            lengths.append(kv.view().seq_len)
            kv.apply_decode(ANY)
        assert lengths == [11, 12, 13, 14, 15]
        assert kv.generated_tokens == 6
        assert kv.registered_blocks == 0  # row 15 was never computed, so its block is not matchable
    assert manager.available_blocks == 31


def test_two_requests_share_the_capacity() -> None:
    with KvCacheManager(10, LAYOUT) as manager:
        with manager.request(prompt(16), 16) as a, manager.request(prompt(16, seed=2), 1) as b:
            free = [manager.available_blocks]
            for kv in (a, b):
                prefill(kv)
                free.append(manager.available_blocks)
            assert free == [9, 8, 7]
        assert manager.available_blocks == 9


def test_decode_crosses_a_page_boundary(manager: KvCacheManager) -> None:
    with manager.request(prompt(16), 2) as kv:
        kv.schedule_prefill(16)
        assert (kv.view().num_pages, kv.view().last_page_len) == (1, 16)
        kv.apply_prefill(ANY)
        assert kv.held_blocks == 1  # nothing is taken ahead of its step
        kv.schedule_decode()
        view = kv.view()
        assert (view.seq_len, view.num_pages, view.last_page_len) == (17, 2, 1)


def test_a_descriptor_carries_view_layout_and_buffer(manager: KvCacheManager) -> None:
    buffer = np.zeros(manager.total_blocks * LAYOUT.page_stride)
    with manager.request(prompt(5), 1) as kv:
        kv.schedule_prefill(5)
        desc = KvViewDesc(kv.view(), manager.layout, buffer)
    assert (desc.seq_len, desc.last_page_len, desc.view.num_pages) == (5, 5, 1)
    assert (desc.layout.page_size, desc.layout.num_layers) == (16, 1)
    assert desc.buffer is buffer
    assert len(desc.view.page_ids) == 1


def test_the_padding_block_is_stable_and_no_request_gets_it(manager: KvCacheManager) -> None:
    padding = manager.padding_block
    with manager.request(prompt(31 * BLOCK), 1) as kv:  # all the pool but the padding
        kv.schedule_prefill(31 * BLOCK)
        assert sorted([*kv.view().page_ids.tolist(), padding]) == list(range(32))
        assert manager.available_blocks == 0
    assert manager.padding_block == padding
    manager.close()
    assert manager.padding_block == padding


@pytest.mark.parametrize(("duplicates", "left"), [("allow", 0), ("keep", 0), ("reject", 2)])
def test_identical_prompts_that_run_together_exhaust_the_pool(duplicates: DuplicatesName, left: int) -> None:
    with KvCacheManager(4, LAYOUT, duplicates=duplicates) as manager:
        requests = [manager.request(prompt(16), 1) for _ in range(3)]
        for kv in requests:  # scheduled together, so none can share with another
            kv.schedule_prefill(16)
        assert manager.available_blocks == 0
        for kv in requests:
            kv.apply_prefill(ANY)
        assert manager.available_blocks == left
        with manager.request(prompt(16 * (left + 1), seed=2), 1) as late:
            before = manager.blocks.store.dump()
            with pytest.raises(CapacityExhausted, match=f"asked for {left + 1} blocks"):
                late.schedule_prefill(16 * (left + 1))
            assert (manager.blocks.store.dump(), late.state, late.held_blocks) == (before, "idle", 0)
        for kv in requests:
            kv.close()
        assert manager.available_blocks == 3


def test_a_schedule_that_is_never_applied_returns_its_blocks_at_the_end_of_scope(
    manager: KvCacheManager,
) -> None:
    with manager.request(prompt(32), 1) as kv:
        kv.schedule_prefill(32)
        assert manager.available_blocks == 29
    assert manager.available_blocks == 31


def test_a_view_knows_how_many_tokens_fit(manager: KvCacheManager) -> None:
    with manager.request(prompt(8), 1) as kv:
        kv.schedule_prefill(8)
        kv.view().require_capacity(16)
        with pytest.raises(InvalidArgument, match="17 tokens do not fit into 1 pages of 16"):
            kv.view().require_capacity(17)


def test_a_decode_view_is_one_longer_than_what_is_computed(manager: KvCacheManager) -> None:
    with manager.request(prompt(10), 4) as kv:
        prefill(kv)
        for _ in range(3):
            kv.schedule_decode()
            assert kv.view().seq_len == kv.computed_tokens + 1
            kv.apply_decode(ANY)


def test_a_prefill_view_covers_the_whole_prompt(manager: KvCacheManager) -> None:
    with manager.request(prompt(20), 1) as kv:
        kv.schedule_prefill(20)
        assert (kv.view().seq_len, kv.view().num_pages) == (20, 2)
        kv.view().require_capacity(20)


def test_an_adapter_isolates_the_prefix_cache(manager: KvCacheManager) -> None:
    fill_cache(manager, prompt(48), lora="a")
    for lora, cached in (("", 0), ("b", 0), ("a", 32)):
        with manager.request(prompt(48), 1, lora=lora) as kv:
            assert kv.match_prefix() == cached


# --- every step of many requests ------------------------------------------------------------------


def test_every_step_of_every_short_prompt_is_sound(manager: KvCacheManager) -> None:
    memory = Memory()  # pages are used again and again, with other requests' rows in them
    for length in range(1, 49):
        with manager.request(prompt(length, seed=length), 25) as kv:
            kv.schedule_prefill(length)
            assert_sound(manager, [kv])
            kv.apply_prefill(memory.forward(kv)[-1])
            for _ in range(24):
                kv.schedule_decode()
                assert_sound(manager, [kv])
                outcome = kv.apply_decode(memory.forward(kv)[-1])
                assert outcome.blocks_registered == (kv.computed_tokens % BLOCK == 0)
                assert outcome.finished == kv.finished
                assert_sound(manager, [kv])
            assert kv.finished
            assert output(kv) == greedy(prompt(length, seed=length), 25)
    assert_idle(manager)


@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_chunks_may_end_anywhere(duplicates: DuplicatesName) -> None:
    rng = random.Random(5)
    memory = Memory()
    with KvCacheManager(12, LAYOUT, duplicates=duplicates) as manager:
        for length in range(1, 49):
            tokens = prompt(length, seed=rng.choice([1, length]))
            with manager.request(tokens, 9) as kv:
                if rng.random() < 0.5:
                    kv.match_prefix()
                while left := length - kv.computed_tokens:
                    kv.schedule_prefill(rng.randint(1, left))
                    assert_sound(manager, [kv])
                    sampled = memory.forward(kv)[-1]
                    done = kv.scheduled_tokens == left
                    outcome = kv.apply_prefill(sampled if done else None)
                    assert outcome.finished is False
                    assert_sound(manager, [kv])
                while not kv.finished:
                    decode(kv, memory)
                    assert_sound(manager, [kv])
                assert output(kv) == greedy(tokens, 9)
        assert_idle(manager)


def test_a_chunk_that_ends_inside_a_block_does_not_register_it(manager: KvCacheManager) -> None:
    with manager.request(prompt(32), 1) as kv:
        kv.schedule_prefill(20)
        assert kv.apply_prefill().blocks_registered == 1
        with manager.request(prompt(32), 1) as other:
            assert other.match_prefix() == 16
        kv.schedule_prefill(12)
        assert kv.apply_prefill(ANY).blocks_registered == 1


def test_a_block_that_the_sampled_token_completes_waits_for_its_last_row(manager: KvCacheManager) -> None:
    with manager.request(prompt(15), 3) as kv:
        prefill(kv)
        assert (len(kv.tokens), kv.registered_blocks) == (16, 0)
        kv.schedule_decode()
        assert kv.view().num_pages == 1  # a whole page of rows, and no page ahead
        assert kv.apply_decode(ANY).blocks_registered == 1
        kv.schedule_decode()
        assert kv.view().num_pages == 2


def test_a_request_that_ends_on_a_boundary_leaves_no_uncomputed_row_in_the_cache(
    manager: KvCacheManager,
) -> None:
    memory = Memory()
    with manager.request(prompt(10), 6) as kv:
        tokens = prompt(10) + run(kv, memory)
    assert len(tokens) == 16
    with manager.request([*tokens, 1], 1) as again:
        assert again.match_prefix() == 0
        assert run(again, memory) == greedy([*tokens, 1], 1)


# --- sharing --------------------------------------------------------------------------------------


def test_a_fully_cached_prompt_keeps_one_token_to_compute(manager: KvCacheManager) -> None:
    fill_cache(manager, prompt(64))
    for length, cached in ((64, 48), (65, 64), (50, 48), (49, 48), (48, 32), (16, 0), (17, 16), (1, 0)):
        with manager.request(prompt(length), 2) as kv:
            assert kv.match_prefix() == kv.cached_tokens == kv.computed_tokens == cached
            assert (kv.held_blocks, kv.registered_blocks) == (cached // BLOCK, cached // BLOCK)
            prefill(kv)
            decode(kv)


def test_a_warm_request_says_what_a_cold_one_said(manager: KvCacheManager) -> None:
    memory = Memory()
    for expected in (0, 48, 48):
        with manager.request(prompt(50), 40) as kv:
            assert kv.match_prefix() == expected
            kv.schedule_prefill(50 - expected)
            assert kv.view().positions(kv.scheduled_tokens)[0] == expected
            kv.revert()
            assert run(kv, memory) == greedy(prompt(50), 40)


def test_the_next_turn_finds_the_answer_of_the_last_one(manager: KvCacheManager) -> None:
    memory = Memory()
    with manager.request(prompt(20), 30) as kv:
        history = prompt(20) + run(kv, memory)
    with manager.request([*history, 5, 6], 3) as kv:
        assert kv.match_prefix() == 48  # 49 of the 50 tokens were computed
        assert run(kv, memory) == greedy([*history, 5, 6], 3)


def test_concurrent_identical_prompts_name_more_pages_than_there_are_blocks() -> None:
    with KvCacheManager(13, LAYOUT) as manager:
        fill_cache(manager, prompt(96))
        requests = [manager.request(prompt(97), 4) for _ in range(5)]
        for kv in requests:
            assert kv.match_prefix() == 96
            kv.schedule_prefill(1)
        views = [kv.view() for kv in requests]
        assert sum(view.num_pages for view in views) == 35 > manager.total_blocks
        assert len({page for view in views for page in view.page_ids.tolist()}) == 6 + 5
        assert manager.available_blocks == 1
        assert_sound(manager, requests)
        for kv in requests:
            kv.close()
        assert_idle(manager)


@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_identical_requests_side_by_side_say_the_same(duplicates: DuplicatesName) -> None:
    memory = Memory()
    with KvCacheManager(20, LAYOUT, duplicates=duplicates) as manager:
        requests = [manager.request(prompt(30), 40) for _ in range(3)]
        for kv in requests:
            prefill(kv, memory, chunk=7)
        while not requests[0].finished:
            for kv in requests:
                decode(kv, memory)
                assert_sound(manager, requests)
        assert [output(kv) for kv in requests] == [greedy(prompt(30), 40)] * 3
        for kv in requests:
            kv.close()
        assert_idle(manager)


def test_under_reject_the_page_table_follows_the_block_that_holds_the_rows() -> None:
    memory = Memory()
    with KvCacheManager(8, LAYOUT, duplicates="reject") as manager:
        a, b = manager.request(prompt(32), 3), manager.request(prompt(32), 3)
        for kv in (a, b):
            kv.schedule_prefill(32)
        own = b.view().page_ids.tolist()
        for kv in (a, b):
            kv.apply_prefill(memory.forward(kv)[-1])
        a.schedule_decode()
        b.schedule_decode()
        assert b.view().page_ids.tolist()[:2] == a.view().page_ids.tolist()[:2] != own
        # The freed slots go to somebody else, who writes to them.
        with manager.request(prompt(48, seed=2), 1) as other:
            other.schedule_prefill(48)
            assert set(own) <= set(other.view().page_ids.tolist())
            other.apply_prefill(memory.forward(other)[-1])
        for kv in (a, b):
            kv.apply_decode(memory.forward(kv)[-1])
            assert run(kv, memory) == greedy(prompt(32), 3)
        a.close()
        assert_sound(manager, [b])
        b.close()
        assert_idle(manager)

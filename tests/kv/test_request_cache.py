"""What requests announce, what stays apart, and a cache that is switched off."""

from __future__ import annotations

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
    prefill,
    prompt,
    run,
)
from model.side_by_side import DUPLICATES, DuplicatesName
from understudy.events import Removed, Stored
from understudy.events import decode as decode_events
from understudy.kv import KvCacheManager
from understudy.tokens import TokenBlocks

# --- events ---------------------------------------------------------------------------------------


def drained(manager: KvCacheManager) -> list[Stored | Removed]:
    batch = manager.blocks.store.drain_events()
    events = decode_events(batch, dp_rank=3, block_size=BLOCK, stream="raw")
    assert all(isinstance(event, Stored | Removed) for event in events)
    return [event for event in events if isinstance(event, Stored | Removed)]


def test_a_block_is_announced_when_its_last_row_is_computed() -> None:
    with KvCacheManager(32, LAYOUT, dp_rank=3, events=True, event_token_ids=True) as manager:
        with manager.request(prompt(38), 30) as kv:
            announced = 0
            while not kv.finished:
                if kv.computed_tokens < 38:
                    kv.schedule_prefill(min(10, 38 - kv.computed_tokens))
                    assert drained(manager) == []  # scheduled is not computed
                    kv.apply_prefill(1 if kv.view().seq_len == 38 else None)
                else:
                    kv.schedule_decode()
                    assert drained(manager) == []
                    kv.apply_decode(kv.generated_tokens)
                tokens = kv.tokens.tolist()
                whole = TokenBlocks(tokens, BLOCK).identities
                for event in drained(manager):
                    assert isinstance(event, Stored)
                    assert event.dp_rank == 3
                    for block in event.blocks:
                        assert block.position == announced
                        assert block.sequence_hash == whole[announced].sequence_hash
                        assert block.token_ids == tuple(tokens[announced * BLOCK : (announced + 1) * BLOCK])
                        announced += 1
                assert announced == kv.computed_tokens // BLOCK
            assert announced == 4
        assert drained(manager) == []  # cached blocks are still there


def test_nothing_is_announced_for_a_step_that_is_reverted_or_a_request_that_is_closed() -> None:
    with KvCacheManager(8, LAYOUT, dp_rank=3, events=True) as manager:
        with manager.request(prompt(64), 1) as kv:
            kv.schedule_prefill(64)
            kv.revert()
            kv.schedule_prefill(40)
        assert drained(manager) == []


def test_an_evicted_block_is_announced_as_removed() -> None:
    with KvCacheManager(4, LAYOUT, dp_rank=3, events=True) as manager:
        fill_cache(manager, prompt(32))
        (stored,) = drained(manager)
        fill_cache(manager, prompt(48, seed=2))
        removed, _ = drained(manager)
        assert isinstance(stored, Stored)
        assert isinstance(removed, Removed)
        assert [b.sequence_hash for b in removed.blocks] == [b.sequence_hash for b in stored.blocks[::-1]]


def test_a_reader_of_the_events_knows_what_a_request_can_match() -> None:
    with KvCacheManager(6, LAYOUT, dp_rank=3, events=True) as manager:
        resident: set[int] = set()
        for seed in (1, 2, 1, 3, 2, 2):
            with manager.request(prompt(40, seed=seed), 12) as kv:
                index = TokenBlocks(prompt(40, seed=seed), BLOCK).identities
                expected = sum(1 for block in index if block.sequence_hash in resident)
                assert kv.match_prefix() == expected * BLOCK
                run(kv)
            for event in drained(manager):
                hashes = {block.sequence_hash for block in event.blocks}
                resident = resident | hashes if isinstance(event, Stored) else resident - hashes


# --- what keeps two caches apart ------------------------------------------------------------------


def test_salts_and_adapters_separate_equal_prompts() -> None:
    with KvCacheManager(64, LAYOUT) as manager:
        kinds = [("", ""), ("tenant", ""), ("", "tenant"), ("tenant", "adapter"), ("other", "")]
        for salt, lora in kinds:
            with manager.request(prompt(48), 20, salt=salt, lora=lora) as kv:
                assert kv.match_prefix() == 0
                run(kv)
        for salt, lora in kinds:
            with manager.request(prompt(48), 1, salt=salt, lora=lora) as kv:
                assert kv.match_prefix() == 32
        assert manager.blocks.metrics().inactive_blocks == 4 * len(kinds)


def test_images_separate_prompts_with_equal_placeholders() -> None:
    with KvCacheManager(64, LAYOUT) as manager:
        tokens = prompt(16) + [0] * 20 + prompt(16, seed=2)
        for image in (0xCA7, 0xD06):
            with manager.request(tokens, 1, mm_runs=[(image, 16, 20)]) as kv:
                assert kv.match_prefix() == (0 if image == 0xCA7 else 16)  # the text in front is shared
                prefill(kv)
                assert kv.registered_blocks == 3
        for image in (0xCA7, 0xD06):
            with manager.request(tokens, 1, mm_runs=[(image, 16, 20)]) as kv:
                assert kv.match_prefix() == 48
        with manager.request(tokens, 1) as kv:
            assert kv.match_prefix() == 16


def test_generated_tokens_behind_an_image_are_cached_too() -> None:
    with KvCacheManager(64, LAYOUT) as manager:
        with manager.request([0] * 20, 30, mm_runs=[(9, 4, 10)]) as kv:
            run(kv)
            tokens = kv.tokens.tolist()
        with manager.request(tokens, 1, mm_runs=[(9, 4, 10)]) as kv:
            assert kv.match_prefix() == 48
        with manager.request(tokens, 1, mm_runs=[(9, 5, 10)]) as kv:
            assert kv.match_prefix() == 0


# --- without a cache ------------------------------------------------------------------------------


def test_without_prefix_caching_nothing_is_shared_and_nothing_stays() -> None:
    memory = Memory()
    with KvCacheManager(32, LAYOUT, prefix_caching=False, dp_rank=3, events=True) as manager:
        for _ in range(2):
            a, b = manager.request(prompt(40), 20), manager.request(prompt(40), 20)
            for kv in (a, b):
                assert kv.match_prefix() == 0
                prefill(kv, memory)
                decode(kv, memory)
            a.schedule_decode()
            b.schedule_decode()
            assert set(a.view().page_ids.tolist()).isdisjoint(b.view().page_ids.tolist())
            assert_sound(manager, [a, b])
            for kv in (a, b):
                kv.revert()
                assert run(kv, memory) == greedy(prompt(40), 20)
                assert kv.registered_blocks == 0
                kv.close()
            assert manager.blocks.metrics().inactive_blocks == 0
        assert drained(manager) == []
        assert_idle(manager)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_the_same_prompt_twice_fits_into_a_pool_that_is_just_large_enough(
    duplicates: DuplicatesName, prefix_caching: bool
) -> None:
    """Blocks that nobody may match, or that are computed again, must not pin a second slot."""
    with KvCacheManager(5, LAYOUT, duplicates=duplicates, prefix_caching=prefix_caching) as manager:
        assert manager.lifetime_blocks(40, 25) == 4 == manager.max_request_blocks
        for matches in (False, True, False):
            with manager.request(prompt(40), 25) as kv:
                if matches:
                    assert kv.match_prefix() == (32 if prefix_caching else 0)
                run(kv)
        assert_idle(manager)


@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_recomputing_a_cached_block_does_not_hold_a_second_slot(duplicates: DuplicatesName) -> None:
    with KvCacheManager(8, LAYOUT, duplicates=duplicates) as manager:
        fill_cache(manager, prompt(32))
        with manager.request(prompt(32), 1) as kv:
            assert kv.match_prefix() == 16  # the last block is computed again, though it is cached
            kv.schedule_prefill(16)
            kv.apply_prefill(ANY)
            assert manager.available_blocks == 5
        assert_idle(manager)


def test_a_copy_in_use_is_not_given_way_to() -> None:
    memory = Memory()
    with KvCacheManager(8, LAYOUT) as manager:
        a, b = manager.request(prompt(32), 20), manager.request(prompt(32), 20)
        a.schedule_prefill(32)
        b.schedule_prefill(32)
        a.apply_prefill(memory.forward(a)[-1])
        b.apply_prefill(memory.forward(b)[-1])
        a.close()  # its blocks stay pinned below b's copies, which are what b reads
        assert run(b, memory) == greedy(prompt(32), 20)
        b.close()
        assert_idle(manager)
        with manager.request(prompt(33), 1) as kv:
            assert kv.match_prefix() == 32
            assert run(kv, memory) == greedy(prompt(33), 1)

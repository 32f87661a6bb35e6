"""What a block goes through: empty, mutable, staged, registered, cached, and back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kv.building import cache, chain, ids, pools, register, roots
from model.side_by_side import NATIVE_POLICIES, NativeName
from understudy.errors import CapacityExhausted, InvalidArgument
from understudy.kv import BlockManager

if TYPE_CHECKING:
    from understudy.kv import MutableBlocks, RegisteredBlocks

# --- allocating -----------------------------------------------------------------------------------


def test_a_new_pool_is_empty_and_hands_out_its_blocks_in_order() -> None:
    manager = BlockManager(100)
    assert pools(manager) == (100, 0)
    with manager.allocate(100) as blocks:
        assert blocks.ids.tolist() == list(range(100))
        assert len(blocks.evicted) == 0


def test_asking_for_more_than_is_available_takes_nothing() -> None:
    manager = BlockManager(5)
    with pytest.raises(CapacityExhausted, match="asked for 10 blocks"):
        manager.allocate(10)
    with manager.allocate(3), pytest.raises(CapacityExhausted, match="only 2 of 5"):
        manager.allocate(3)
    assert pools(manager) == (5, 0)


def test_allocations_add_up_and_releases_in_any_order_restore_the_pool() -> None:
    manager = BlockManager(10)
    guards = [manager.allocate(count) for count in (3, 4, 3)]
    assert manager.available == 0
    with pytest.raises(CapacityExhausted):
        manager.allocate(1)
    for guard, available in zip(reversed(guards), (3, 7, 10), strict=True):
        guard.release()
        assert manager.available == available


def test_allocating_no_block_is_legal_on_a_full_pool() -> None:
    manager = BlockManager(2)
    with manager.allocate(2), manager.allocate(0) as nothing:
        assert len(nothing) == 0
        assert not nothing.released
    assert manager.metrics().allocations == 2


def test_empty_blocks_go_before_cached_ones_and_evictions_are_listed_at_the_end() -> None:
    manager = BlockManager(4, policy="lru")
    old = roots(2)
    cached = cache(manager, old[:1]) + cache(manager, old[1:])
    with manager.allocate(4) as blocks:
        assert blocks.ids.tolist()[2:] == cached
        assert blocks.evicted == old
    metrics = manager.metrics()
    assert (metrics.allocations, metrics.allocations_from_reset, metrics.evictions) == (6, 4, 2)


def test_only_evicted_blocks_are_reported_as_evicted() -> None:
    manager = BlockManager(3)
    cache(manager, chain(1))
    with manager.allocate(2) as blocks:
        assert len(blocks.evicted) == 0
        rest = blocks.take(1)
        assert len(rest.evicted) == 0
        rest.release()


def test_threads_that_ask_for_everything_never_get_more_than_there_is() -> None:
    manager = BlockManager(16)
    barrier = threading.Barrier(8)
    granted: list[MutableBlocks] = []

    def ask() -> None:
        barrier.wait()
        try:
            granted.append(manager.allocate(16))
        except CapacityExhausted:
            return

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(blocks) for blocks in granted] == [16]
    assert manager.available == 0
    granted[0].release()
    assert pools(manager) == (16, 0)


# --- letting go of what was never registered ------------------------------------------------------


def test_mutable_blocks_go_back_empty() -> None:
    manager = BlockManager(10)
    blocks = manager.allocate(4)
    assert manager.metrics().mutable_blocks == 4
    blocks.release()
    assert pools(manager) == (10, 0)
    assert manager.metrics().mutable_blocks == 0


def test_staged_blocks_go_back_empty_and_are_never_cached() -> None:
    manager = BlockManager(10)
    staged = manager.allocate(4).stage(chain(4))
    assert manager.metrics().staged_blocks == 4
    assert not manager.has_blocks(chain(4)).any()
    staged.release()
    assert pools(manager) == (10, 0)
    assert manager.prefix_length(chain(4)) == 0
    assert manager.metrics().stagings == 4


@pytest.mark.parametrize("policy", NATIVE_POLICIES)
def test_each_way_of_letting_go_leads_to_its_own_pool(policy: NativeName) -> None:
    manager = BlockManager(24, policy=policy)
    manager.allocate(8).release()
    manager.allocate(8).stage(chain(8, 1)).release()
    manager.allocate(8).stage(chain(8, 2)).register().release()
    metrics = manager.metrics()
    assert pools(manager) == (16, 8)
    assert (metrics.stagings, metrics.registrations) == (16, 8)
    assert manager.available == 24


# --- staging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [0, 1, 3])
def test_a_wrong_number_of_identities_leaves_the_same_blocks_in_the_guard(given: int) -> None:
    manager = BlockManager(4)
    blocks = manager.allocate(2)
    before = blocks.ids.tolist()
    with pytest.raises(InvalidArgument, match=f"each of the 2 blocks, got {given}"):
        blocks.stage(chain(given))
    assert blocks.ids.tolist() == before
    assert not blocks.released
    with blocks.stage(chain(2)) as staged:
        assert staged.ids.tolist() == before


def test_staging_back_and_again_keeps_the_ids_and_takes_the_new_hash() -> None:
    manager = BlockManager(4)
    staged = manager.allocate(2).stage(chain(2, 1))
    before = staged.ids.tolist()
    mutable = staged.reset()
    assert (staged.released, mutable.ids.tolist()) == (True, before)
    assert (manager.metrics().mutable_blocks, manager.metrics().staged_blocks) == (2, 0)
    with mutable.stage(chain(2, 2)).register() as blocks:
        assert ids(blocks) == before
        assert blocks.identities == chain(2, 2)
        assert manager.has_blocks(chain(2, 1) + chain(2, 2)).tolist() == [False, False, True, True]
    assert manager.metrics().stagings == 4


# --- registered, cached, matched again ------------------------------------------------------------


def test_a_registered_block_is_matched_cached_and_matched_again() -> None:
    manager = BlockManager(10)
    block = chain(1)

    def gauges() -> tuple[int, int, int, int, int, int]:
        m = manager.metrics()
        return (
            m.reset_blocks,
            m.mutable_blocks,
            m.staged_blocks,
            m.active_blocks,
            m.inactive_blocks,
            m.active_references,
        )

    mutable = manager.allocate(1)
    assert gauges() == (9, 1, 0, 0, 0, 0)
    staged = mutable.stage(block)
    assert gauges() == (9, 0, 1, 0, 0, 0)
    first = staged.register()
    assert gauges() == (9, 0, 0, 1, 0, 1)
    second = manager.match_prefix(block)
    assert ids(second) == ids(first)
    assert gauges() == (9, 0, 0, 1, 0, 2)
    first.release()
    assert gauges() == (9, 0, 0, 1, 0, 1)
    second.release()
    assert gauges() == (9, 0, 0, 0, 1, 0)
    third = manager.match_prefix(block)
    assert gauges() == (9, 0, 0, 1, 0, 1)
    third.release()
    assert gauges() == (9, 0, 0, 0, 1, 0)
    assert manager.available == 10


@pytest.mark.parametrize("policy", NATIVE_POLICIES)
def test_a_full_pool_is_evicted_and_filled_again_and_again(policy: NativeName) -> None:
    manager = BlockManager(16, policy=policy)
    for cycle in range(3):
        assert pools(manager) == ((16, 0) if cycle == 0 else (0, 16))
        blocks = manager.allocate(16)
        assert sorted(blocks.evicted.lineage_hashes) == sorted(
            chain(16, cycle).lineage_hashes if cycle > 0 else []
        )
        blocks.register(chain(16, cycle + 1)).release()
        assert manager.metrics().evictions == 16 * cycle
    assert manager.prefix_length(chain(16, 3)) == 16
    assert not manager.has_blocks(chain(16, 2)).any()


def test_in_a_pool_of_one_a_new_block_takes_the_place_of_the_cached_one() -> None:
    manager = BlockManager(1)
    old, new = chain(1, 1), chain(1, 2)
    cache(manager, old)
    cache(manager, new)
    assert manager.has_blocks(old + new).tolist() == [False, True]


def test_a_clone_keeps_the_block_referenced_after_its_original_is_gone() -> None:
    manager = BlockManager(4)
    original = register(manager, chain(1))
    clones = [original.clone() for _ in range(3)]
    original.release()
    for clone in clones:
        assert manager.available == 3
        assert manager.metrics().active_blocks == 1
        clone.release()
    assert manager.available == 4


def test_two_managers_know_nothing_of_each_other() -> None:
    one, other = BlockManager(4), BlockManager(4)
    with register(one, chain(2)):
        assert other.prefix_length(chain(2)) == 0
        assert one.available == 2
        assert other.available == 4


def test_the_release_order_decides_which_block_goes_first() -> None:
    for tail_first, evicted in ((True, [2, 1, 0]), (False, [0, 1, 2])):
        manager = BlockManager(3, policy="lru")
        register(manager, chain(3)).release(tail_first=tail_first)
        with manager.allocate(3) as blocks:
            assert blocks.evicted.positions.tolist() == evicted


def test_clearing_the_cache_empties_what_is_unreferenced_and_nothing_else() -> None:
    manager = BlockManager(8, events=True)
    with register(manager, chain(2, 1)) as held:
        cache(manager, chain(3, 2))
        manager.store.drain_events()
        assert manager.clear_inactive() == 3
        assert pools(manager) == (6, 0)
        assert manager.has_blocks(chain(2, 1) + chain(3, 2)).tolist() == [True, True, False, False, False]
        metrics = manager.metrics()
        assert (metrics.evictions, metrics.allocations) == (0, 5)
        removed = manager.store.drain_events()
        assert removed.kinds.tolist() == [1, 1, 1]
        assert sorted(removed.sequence_hashes) == sorted(chain(3, 2).sequence_hashes)
        assert ids(held) == [0, 1]
    assert manager.clear_inactive() == 2
    assert manager.clear_inactive() == 0


def test_matching_while_the_last_reference_goes_never_loses_or_doubles_the_block() -> None:
    manager = BlockManager(4)
    block = chain(1)
    cache(manager, block)
    for _ in range(200):
        held = manager.match_prefix(block)
        barrier = threading.Barrier(2)

        def let_go(guard: RegisteredBlocks = held, start: threading.Barrier = barrier) -> None:
            start.wait()
            guard.release()

        thread = threading.Thread(target=let_go)
        thread.start()
        barrier.wait()
        found = manager.match_prefix(block)
        thread.join()
        assert len(found) == 1
        assert manager.metrics().active_blocks == 1
        found.release()
        manager.store.check()
    assert pools(manager) == (3, 1)


# --- weak references ------------------------------------------------------------------------------


def test_a_weak_reference_finds_a_held_block_and_a_cached_one() -> None:
    manager = BlockManager(4)
    blocks = register(manager, chain(2))
    weak = blocks.weak()
    assert len(weak) == 2
    assert weak.identities == chain(2)
    for _ in range(2):  # the second time from the cache
        again = weak.upgrade()
        assert again is not None
        assert ids(again) == [0, 1]
        again.release()
        blocks.release()
    assert pools(manager) == (2, 2)


def test_a_weak_reference_holds_nothing() -> None:
    manager = BlockManager(10, policy="lru", events=True)
    blocks = register(manager, chain(1))
    weak = blocks.weak()
    blocks.release()
    cache(manager, roots(10, 2))
    assert weak.upgrade() is None
    assert manager.store.drain_events().kinds.tolist() == [0] + [1] + [0] * 10


def test_a_weak_reference_finds_a_block_that_was_evicted_and_came_back_elsewhere() -> None:
    manager = BlockManager(3, policy="lru")
    with register(manager, chain(1)) as blocks:
        weak = blocks.weak()
        assert ids(blocks) == [0]
    others = manager.allocate(3)
    assert weak.upgrade() is None
    others.release()
    assert cache(manager, roots(1, 7) + chain(1)) == [0, 2]
    found = weak.upgrade()
    assert found is not None
    assert ids(found) == [2]
    found.release()


def test_upgrading_counts_as_no_use() -> None:
    manager = BlockManager(4, policy="multi_lru")
    with register(manager, chain(1)) as blocks:
        weak = blocks.weak()
    before = manager.metrics()
    again = weak.upgrade()
    assert again is not None
    again.release()
    after = manager.metrics()
    assert manager.frequency(chain(1)[0].lineage_hash) == 1
    assert after.match_hashes_requested == before.match_hashes_requested == 0
    assert after.scan_hashes_requested == 0


@pytest.mark.parametrize("policy", NATIVE_POLICIES)
def test_an_upgrade_that_fails_on_one_block_leaves_the_others_in_their_place(policy: NativeName) -> None:
    manager = BlockManager(6, policy=policy)
    wanted = roots(2, 1)
    blocks = register(manager, wanted)
    weak = blocks.weak()
    blocks.set_reset_on_release(True)
    kept = manager.match_prefix(wanted[:1])
    blocks.release()  # the second block is gone
    kept.set_reset_on_release(False)
    kept.release()
    cache(manager, roots(3, 2))
    before = manager.store.dump()
    assert weak.upgrade() is None
    assert manager.store.dump() == before

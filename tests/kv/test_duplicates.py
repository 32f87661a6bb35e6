"""Registering a hash that is already there: `allow`, `reject` and `keep`."""

from __future__ import annotations

import pytest

from kv.building import cache, chain, ids, pools, register, roots
from model.side_by_side import DUPLICATES, NATIVE_POLICIES, DuplicatesName, NativeName
from understudy.errors import CapacityExhausted
from understudy.kv import BlockManager

# --- the same under every policy ------------------------------------------------------------------


@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_presence_ends_with_the_last_copy(duplicates: DuplicatesName) -> None:
    manager = BlockManager(4, duplicates=duplicates, events=True)
    first, second = register(manager, chain(1)), register(manager, chain(1))
    second.release()
    assert manager.has_blocks(chain(1)).tolist() == [True]
    first.release()
    assert manager.has_blocks(chain(1)).tolist() == [True]
    manager.allocate(4).release()
    assert manager.has_blocks(chain(1)).tolist() == [False]
    batch = manager.store.drain_events()
    assert batch.kinds[batch.sole == 1].tolist() == [0, 1]


@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_a_batch_sees_its_own_earlier_blocks(duplicates: DuplicatesName) -> None:
    manager = BlockManager(6, duplicates=duplicates)
    a, b = roots(1, 1), roots(1, 2)
    with register(manager, a + b + a) as blocks:
        assert ids(blocks) == ([0, 1, 0] if duplicates == "reject" else [0, 1, 2])
        with manager.match_prefix(a) as found:
            assert ids(found) == [0]
    metrics = manager.metrics()
    assert metrics.registrations == 3
    assert metrics.duplicate_blocks == (1 if duplicates == "allow" else 0)
    assert metrics.registration_dedup == (1 if duplicates == "reject" else 0)
    manager.store.check()


# --- allow ----------------------------------------------------------------------------------------


def test_allow_gives_the_newcomer_a_slot_of_its_own_and_finds_the_primary() -> None:
    manager = BlockManager(4)
    first, second = register(manager, chain(1)), register(manager, chain(1))
    assert (ids(first), ids(second)) == ([0], [1])
    assert manager.metrics().duplicate_blocks == 1
    with manager.match_prefix(chain(1)) as found:
        assert ids(found) == [0]
    metrics = manager.metrics()
    assert (metrics.active_blocks, metrics.active_references) == (2, 3)  # with the duplicate's keep-alive
    first.release()
    second.release()
    assert pools(manager) == (3, 1)


def test_allow_keeps_the_primary_alive_as_long_as_its_duplicates() -> None:
    manager = BlockManager(4)
    primary = register(manager, chain(1))
    duplicates = [register(manager, chain(1)) for _ in range(2)]
    primary.release()
    for duplicate, active in zip(duplicates, (3, 2), strict=True):
        metrics = manager.metrics()
        assert (metrics.active_blocks, metrics.inactive_blocks) == (active, 0)
        duplicate.release()
    assert pools(manager) == (3, 1)
    with manager.match_prefix(chain(1)) as found:
        assert ids(found) == [0]


def test_allow_frees_a_duplicate_before_the_primary_it_kept_alive() -> None:
    manager = BlockManager(3, policy="vllm_append")
    primary, duplicate = register(manager, chain(1)), register(manager, chain(1))
    primary.release()
    duplicate.release()
    assert manager.eviction_order().tolist() == [2, 1, 0]


def test_allow_releases_a_primary_and_its_duplicate_in_one_call() -> None:
    manager = BlockManager(4)
    with register(manager, chain(1) + chain(1)) as both:
        assert ids(both) == [0, 1]
    assert pools(manager) == (3, 1)
    manager.store.check()


def test_a_weak_reference_to_a_duplicate_falls_back_on_its_primary() -> None:
    manager = BlockManager(4)
    primary, duplicate = register(manager, chain(1)), register(manager, chain(1))
    weak = duplicate.weak()
    for expected in ([1], [0]):  # itself, and then its primary
        found = weak.upgrade()
        assert found is not None
        assert ids(found) == expected
        found.release()
        duplicate.release()
    primary.release()


def test_a_clone_of_a_duplicate_keeps_both_slots() -> None:
    manager = BlockManager(4)
    primary, duplicate = register(manager, chain(1)), register(manager, chain(1))
    clone = duplicate.clone()
    primary.release()
    duplicate.release()
    assert manager.available == 2
    clone.release()
    assert pools(manager) == (3, 1)


def test_the_primarys_own_flag_counts_when_its_last_duplicate_goes() -> None:
    manager = BlockManager(4, events=True)
    primary, duplicate = register(manager, chain(1)), register(manager, chain(1))
    primary.set_reset_on_release(True)
    primary.release()
    assert manager.prefix_length(chain(1)) == 1
    duplicate.release()
    assert pools(manager) == (4, 0)
    assert manager.store.drain_events().kinds.tolist() == [0, 1]


@pytest.mark.parametrize("policy", NATIVE_POLICIES)
def test_allow_lets_a_cached_twin_give_way_to_the_newcomer(policy: NativeName) -> None:
    manager = BlockManager(4, policy=policy, events=True)
    cache(manager, chain(1))
    with register(manager, chain(1)) as newcomer:
        metrics = manager.metrics()
        assert (metrics.reset_blocks, metrics.inactive_blocks, metrics.active_blocks) == (3, 0, 1)
        assert metrics.duplicate_blocks == 0
        with manager.match_prefix(chain(1)) as found:
            assert ids(found) == ids(newcomer)
    assert pools(manager) == (3, 1)
    assert manager.store.drain_events().kinds.tolist() == [0]  # the hash never left
    manager.store.check()


def test_recomputing_a_cached_prefix_never_takes_more_than_was_allocated() -> None:
    manager = BlockManager(8)
    cache(manager, chain(4))
    with manager.allocate(4) as reserved:
        assert manager.available == 4
        with reserved.register(chain(4)):
            assert manager.available == 4
            manager.allocate(4).release()
            with pytest.raises(CapacityExhausted):
                manager.allocate(5)


def test_a_twin_that_gave_way_is_not_found_through_its_old_slot() -> None:
    manager = BlockManager(4)
    with register(manager, chain(1)) as old:
        weak = old.weak()
    with register(manager, chain(1)) as new:
        found = weak.upgrade()
        assert found is not None
        assert ids(found) == ids(new) != [0]
        found.release()


def test_the_newcomer_brings_its_own_flag() -> None:
    manager = BlockManager(4, reset_on_release=True)
    with register(manager, chain(1)) as blocks:
        blocks.set_reset_on_release(False)
    assert pools(manager) == (3, 1)
    register(manager, chain(1)).release()
    assert pools(manager) == (4, 0)


# --- reject ---------------------------------------------------------------------------------------


def test_reject_returns_the_block_that_is_there() -> None:
    manager = BlockManager(4, duplicates="reject")
    first, second = register(manager, chain(1)), register(manager, chain(1))
    assert ids(first) == ids(second) == [0]
    metrics = manager.metrics()
    assert (metrics.registrations, metrics.registration_dedup, metrics.duplicate_blocks) == (2, 1, 0)
    assert (metrics.active_blocks, metrics.active_references) == (1, 2)
    first.release()
    assert manager.available == 3
    second.release()
    assert pools(manager) == (3, 1)


def test_the_slot_of_a_rejected_block_is_the_next_to_be_handed_out() -> None:
    manager = BlockManager(2, duplicates="reject")
    with register(manager, chain(1)), register(manager, chain(1)) as second:
        assert ids(second) == [0]
        with manager.allocate(1) as free:
            assert free.ids.tolist() == [1]
    metrics = manager.metrics()
    assert (metrics.registrations, metrics.registration_dedup) == (2, 1)


def test_reject_in_a_batch_keeps_the_order_and_names_the_blocks_that_hold_the_hashes() -> None:
    manager = BlockManager(8, duplicates="reject", events=True)
    a, b, c = (roots(1, seed) for seed in (1, 2, 3))
    with register(manager, a) as first:
        candidates = manager.allocate(4)
        assert candidates.ids.tolist() == [1, 2, 3, 4]
        with candidates.stage(b + a + b + c).register() as blocks:
            assert ids(blocks) == [1, ids(first)[0], 1, 4]
            assert manager.metrics().registration_dedup == 2
            assert manager.metrics().reset_blocks == 3 + 2
            assert manager.has_blocks(a + b + c).all()
            assert manager.metrics().active_references == 5
    assert pools(manager) == (5, 3)
    assert manager.store.drain_events().kinds.tolist() == [0, 0, 0]


@pytest.mark.parametrize("policy", NATIVE_POLICIES)
def test_reject_revives_a_cached_block_and_frees_the_newcomer(policy: NativeName) -> None:
    manager = BlockManager(4, policy=policy, duplicates="reject")
    [original] = cache(manager, chain(1))
    with register(manager, chain(1)) as blocks:
        assert ids(blocks) == [original]
        assert manager.metrics().reset_blocks == 3
    assert manager.metrics().registration_dedup == 1


# --- keep -----------------------------------------------------------------------------------------


def test_keep_lets_equal_blocks_live_side_by_side_and_finds_the_earliest() -> None:
    manager = BlockManager(4, duplicates="keep")
    first, second = register(manager, chain(1)), register(manager, chain(1))
    assert (ids(first), ids(second)) == ([0], [1])
    metrics = manager.metrics()
    assert (metrics.active_blocks, metrics.active_references) == (2, 2)  # no keep-alive
    assert (metrics.duplicate_blocks, metrics.registration_dedup) == (0, 0)
    with manager.match_prefix(chain(1)) as found:
        assert ids(found) == [0]
    first.release()
    second.release()
    assert pools(manager) == (2, 2)


def test_keep_finds_the_earliest_copy_even_when_a_later_one_is_in_use() -> None:
    manager = BlockManager(4, duplicates="keep")
    cache(manager, chain(1))
    with register(manager, chain(1)) as later:
        assert ids(later) == [1]
        with manager.match_prefix(chain(1)) as found:
            assert ids(found) == [0]


def test_keep_finds_the_earliest_copy_that_is_still_there() -> None:
    manager = BlockManager(3, duplicates="keep", policy="lru")
    for copy in [register(manager, chain(1)) for _ in range(3)]:
        copy.release()
    held = []
    for evicted in (0, 2):  # the match in between makes copy 1 the most recently used
        held.append(manager.allocate(1))
        assert held[-1].ids.tolist() == [evicted]
        with manager.match_prefix(chain(1)) as found:
            assert ids(found) == [1]
    held.append(manager.allocate(1))
    assert manager.prefix_length(chain(1)) == 0
    for blocks in held:
        blocks.release()


def test_keep_evicts_each_copy_on_its_own() -> None:
    manager = BlockManager(2, duplicates="keep", policy="fifo", events=True)
    first, second = register(manager, chain(1)), register(manager, chain(1))
    second.release()
    first.release()
    with manager.allocate(1) as blocks:
        assert blocks.ids.tolist() == [1]
        assert blocks.evicted == chain(1)
        assert manager.prefix_length(chain(1)) == 1
        with manager.match_prefix(chain(1)) as found:
            assert ids(found) == [0]
        with manager.allocate(1) as more:
            assert more.evicted == chain(1)
            assert manager.prefix_length(chain(1)) == 0
    batch = manager.store.drain_events()
    assert batch.kinds.tolist() == [0, 0, 1, 1]
    assert batch.sole.tolist() == [1, 0, 0, 1]
    assert len(set(batch.generations.tolist())) == 1


def test_keep_upgrades_a_weak_reference_to_its_own_copy_first() -> None:
    manager = BlockManager(3, duplicates="keep")
    first, second = register(manager, chain(1)), register(manager, chain(1))
    weak = second.weak()
    second.set_reset_on_release(True)
    found = weak.upgrade()
    assert found is not None
    assert ids(found) == [1]
    second.release()
    found.release()
    found = weak.upgrade()
    assert found is not None
    assert ids(found) == [0]
    found.release()
    first.release()


def test_keep_touches_only_the_copy_that_a_lookup_would_return() -> None:
    manager = BlockManager(3, duplicates="keep", policy="lru")
    cache(manager, chain(1))
    cache(manager, chain(1))
    cache(manager, chain(1, 2))
    manager.touch(chain(1))
    assert manager.eviction_order().tolist() == [1, 2, 0]

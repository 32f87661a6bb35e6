"""Finding blocks: prefixes, scattered hits, scans, presence, and what counts as a use."""

from __future__ import annotations

import pytest

from kv.building import cache, chain, ids, pools, register, roots
from model.side_by_side import NATIVE_POLICIES, NativeName
from model.world import join
from understudy.kv import BlockManager, RegisteredBlocks
from understudy.tokens import Identities


def with_cached(manager: BlockManager, identities: Identities, cached: set[int]) -> RegisteredBlocks:
    """Register all; the positions in `cached` are left unreferenced, the rest is held by the guard."""
    register(manager, identities).release()
    held = join([identities[i : i + 1] for i in range(len(identities)) if i not in cached])
    return manager.match_scattered(held)[0]


def uses(manager: BlockManager, identities: Identities) -> list[int]:
    return [manager.frequency(lineage) for lineage in identities.lineage_hashes]


# --- prefixes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cached",
    [{2, 3}, {0, 1}, {1}, {4, 5}, set(), {0, 1, 2, 3, 4, 5}],
    ids=lambda s: "".join(map(str, sorted(s))),
)
def test_a_prefix_of_held_and_cached_blocks_in_any_mixture_is_found_whole(cached: set[int]) -> None:
    manager = BlockManager(8)
    held = with_cached(manager, chain(6), cached)
    assert manager.metrics().inactive_blocks == len(cached)
    with manager.match_prefix(chain(6)) as found:
        assert ids(found) == [0, 1, 2, 3, 4, 5]
        assert found.identities == chain(6)
        assert manager.metrics().inactive_blocks == 0
    held.release()
    assert pools(manager) == (2, 6)


def test_a_prefix_ends_at_its_first_miss() -> None:
    manager = BlockManager(8)
    here = chain(4)
    with register(manager, here[:2] + here[3:]) as held:
        before = manager.metrics()
        with manager.match_prefix(here) as found:
            assert ids(found) == ids(held)[:2]
            assert found.identities == here[:2]
            assert manager.metrics().active_references == 5
        assert manager.prefix_length(here) == 2
        after = manager.metrics()
        assert after.match_hashes_requested - before.match_hashes_requested == 4
        assert after.match_blocks_returned - before.match_blocks_returned == 2


def test_blocks_behind_the_miss_stay_cached() -> None:
    manager = BlockManager(8)
    here = chain(4)
    cache(manager, here[:1] + here[2:])
    with manager.match_prefix(here):
        assert pools(manager) == (5, 2)


def test_nothing_is_found_for_no_question_or_in_an_empty_pool() -> None:
    manager = BlockManager(4)
    for asked in (Identities(), chain(3)):
        with manager.match_prefix(asked) as found:
            assert len(found) == 0
            assert len(found.identities) == 0
    assert manager.metrics().match_hashes_requested == 3
    assert manager.metrics().match_blocks_returned == 0


def test_a_block_is_found_by_its_full_hash_only() -> None:
    manager = BlockManager(4)
    root = chain(1)
    child = Identities.from_sequence_hashes([77], parent_hash=root[0].sequence_hash, start_position=1)
    stepchild = Identities.from_sequence_hashes([77], parent_hash=5, start_position=1)
    near = Identities.from_sequence_hashes([77 + 2**54], parent_hash=root[0].sequence_hash, start_position=1)
    elsewhere = Identities.from_sequence_hashes([77], start_position=2)
    cache(manager, child)
    assert manager.has_blocks(child + stepchild + near + elsewhere).tolist() == [True, False, False, False]


def test_a_prefix_match_that_repeats_a_block_references_it_twice() -> None:
    manager = BlockManager(4)
    cache(manager, chain(1))
    with manager.match_prefix(chain(1) + chain(1)) as found:
        assert ids(found) == [0, 0]
        assert manager.metrics().active_references == 2
        assert manager.metrics().active_blocks == 1
    assert pools(manager) == (3, 1)


# --- scattered ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", NATIVE_POLICIES)
def test_scattered_hits_stay_aligned_with_the_question(policy: NativeName) -> None:
    manager = BlockManager(8, policy=policy)
    active, inactive, miss = roots(1, 1), roots(1, 2), roots(1, 3)
    held = register(manager, active)
    [cached] = cache(manager, inactive)
    before = manager.metrics()
    found, mask = manager.match_scattered(active + miss + inactive + inactive + active)
    assert mask.tolist() == [True, False, True, True, True]
    assert ids(found) == [ids(held)[0], cached, cached, ids(held)[0]]
    assert found.identities == active + inactive + inactive + active
    after = manager.metrics()
    assert after.match_hashes_requested - before.match_hashes_requested == 5
    assert after.match_blocks_returned - before.match_blocks_returned == 4
    assert (after.scan_hashes_requested, after.scan_blocks_returned) == (0, 0)
    assert after.active_references == 5
    found.release()
    held.release()
    assert pools(manager) == (6, 2)


def test_a_scattered_match_of_nothing_is_empty() -> None:
    manager = BlockManager(2)
    found, mask = manager.match_scattered(Identities())
    assert (len(found), mask.tolist()) == (0, [])
    found, mask = manager.match_scattered(chain(3))
    assert (len(found), mask.tolist()) == (0, [False, False, False])


# --- scans ----------------------------------------------------------------------------------------


def test_a_scan_counts_what_was_asked_and_the_distinct_blocks_it_found() -> None:
    manager = BlockManager(4)
    here, miss = roots(1, 1), roots(1, 2)
    cache(manager, here)
    with manager.scan(here + here + miss) as found:
        assert ids(found) == [0]
        assert found.identities == here
        assert manager.metrics().active_references == 1
    metrics = manager.metrics()
    assert (metrics.scan_hashes_requested, metrics.scan_blocks_returned) == (3, 1)
    assert (metrics.match_hashes_requested, metrics.match_blocks_returned) == (0, 0)


def test_a_scan_goes_on_behind_a_miss_and_leaves_the_rest_cached() -> None:
    manager = BlockManager(8)
    here = roots(3)
    cache(manager, here)
    with manager.scan(here[:1] + roots(1, 9) + here[2:]) as found:
        assert found.identities == here[:1] + here[2:]
        assert manager.metrics().inactive_blocks == 1
    assert manager.metrics().inactive_blocks == 3


# --- looking without touching ---------------------------------------------------------------------


def test_looking_changes_nothing_at_all() -> None:
    manager = BlockManager(8, policy="multi_lru", events=True)
    held = with_cached(manager, chain(4), {1, 3})
    before = manager.store.dump()
    order = manager.eviction_order().tolist()
    assert manager.has_blocks(chain(6)).tolist() == [True] * 4 + [False] * 2
    assert manager.prefix_length(chain(6)) == 4
    assert manager.has_blocks(Identities()).tolist() == []
    assert manager.prefix_length(Identities()) == 0
    assert manager.store.dump() == before
    assert manager.eviction_order().tolist() == order
    held.release()


def test_a_question_of_many_blocks_is_answered_in_one_call() -> None:
    manager = BlockManager(1000)
    every = chain(1000)
    cache(manager, every[:700])
    assert manager.has_blocks(every).tolist() == [True] * 700 + [False] * 300
    with manager.match_prefix(every) as found:
        assert ids(found) == list(range(700))


# --- what counts as a use -------------------------------------------------------------------------


def test_a_first_registration_counts_as_one_use_and_a_repeated_one_as_none() -> None:
    for duplicates in ("allow", "reject", "keep"):
        manager = BlockManager(8, sketch_capacity=1024, duplicates=duplicates)
        with register(manager, chain(2)), register(manager, chain(2)):
            assert uses(manager, chain(3)) == [1, 1, 0]


def test_each_hit_of_a_match_counts_once_and_a_miss_not_at_all() -> None:
    manager = BlockManager(8, sketch_capacity=1024)
    held = with_cached(manager, chain(6), {2, 3})
    assert uses(manager, chain(6)) == [2, 2, 1, 1, 2, 2]
    manager.match_prefix(chain(5)).release()
    assert uses(manager, chain(6)) == [3, 3, 2, 2, 3, 2]
    manager.match_prefix(chain(3, 2)).release()
    assert uses(manager, chain(6) + chain(3, 2)) == [3, 3, 2, 2, 3, 2, 0, 0, 0]
    held.release()


def test_a_scattered_match_counts_every_occurrence_of_a_hit() -> None:
    manager = BlockManager(8, sketch_capacity=1024)
    cache(manager, chain(2))
    manager.match_scattered(chain(1) + chain(1, 2) + chain(1) + chain(2)[1:])[0].release()
    assert uses(manager, chain(2) + chain(1, 2)) == [3, 2, 0]


@pytest.mark.parametrize(("touch", "expected"), [(True, [3, 1, 0]), (False, [1, 1, 0])])
def test_a_scan_counts_uses_only_when_told_to(touch: bool, expected: list[int]) -> None:
    manager = BlockManager(8, sketch_capacity=1024)
    cache(manager, chain(2))
    manager.scan(chain(1) + chain(1) + chain(1, 2), touch=touch).release()
    assert uses(manager, chain(2) + chain(1, 2)) == expected


def test_touching_counts_the_blocks_that_are_here_and_references_none() -> None:
    manager = BlockManager(8, sketch_capacity=1024)
    cache(manager, chain(2))
    manager.touch(chain(2) + chain(1, 2))
    assert uses(manager, chain(2) + chain(1, 2)) == [2, 2, 0]
    assert manager.metrics().active_references == 0
    assert pools(manager) == (6, 2)


def test_uses_saturate_at_fifteen_and_are_zero_without_a_sketch() -> None:
    manager = BlockManager(4, sketch_capacity=1024)
    cache(manager, chain(1))
    for _ in range(40):
        manager.touch(chain(1))
    assert uses(manager, chain(1)) == [15]
    plain = BlockManager(4, policy="lru")
    cache(plain, chain(1))
    plain.touch(chain(1))
    assert uses(plain, chain(1)) == [0]


# --- registering in batches -----------------------------------------------------------------------


def test_a_batch_is_registered_in_the_order_it_was_given_whatever_the_positions() -> None:
    manager = BlockManager(8, events=True)
    mixed = join([chain(4)[i : i + 1] for i in (2, 0, 3, 1)])
    with register(manager, mixed) as blocks:
        assert ids(blocks) == [0, 1, 2, 3]
        assert blocks.identities == mixed
    assert manager.store.drain_events().positions.tolist() == [2, 0, 3, 1]


def test_a_batch_announces_and_counts_only_what_is_new() -> None:
    manager = BlockManager(8, events=True, duplicates="reject", sketch_capacity=1024)
    a, b, c = (roots(1, seed) for seed in (1, 2, 3))
    with register(manager, b):
        manager.store.drain_events()
        with register(manager, c + a + b + a) as blocks:
            assert ids(blocks) == [1, 2, 0, 2]
            stored = manager.store.drain_events()
            assert stored.sequence_hashes.tolist() == (c + a).sequence_hashes.tolist()
            assert uses(manager, a + b + c) == [1, 1, 1]


def test_an_evicted_block_is_forgotten_and_can_be_registered_anew() -> None:
    manager = BlockManager(1, events=True, sketch_capacity=1024)
    cache(manager, chain(1, 1))
    cache(manager, chain(1, 2))
    cache(manager, chain(1, 1))
    assert manager.has_blocks(chain(1, 1) + chain(1, 2)).tolist() == [True, False]
    assert uses(manager, chain(1, 1)) == [2]
    assert manager.store.drain_events().kinds.tolist() == [0, 1, 0, 1, 0]

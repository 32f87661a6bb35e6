"""The kvbm KV manager: acquire, release, seal, discard, and what they cost and say."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from engines.kv_building import manager, pools, raw, refused, removed, root, roots, stored, tree
from understudy.engines.kv_manager import KvManager
from understudy.errors import CapacityExhausted, ConfigError, InvalidArgument, UnknownBlock, WrongState
from understudy.kv import BUILT_IN_POLICIES
from understudy.tokens import Identities

if TYPE_CHECKING:
    from collections.abc import Callable


# ── Acquire ──


def test_a_block_acquired_twice_is_one_block_with_two_references() -> None:
    kv = manager()
    assert kv.acquire(tree(0)) == 1
    kv.acquire(tree(0))
    assert pools(kv) == (1, 0, 2)
    assert kv.references(tree(0)[0]) == 2
    assert raw(kv) == [stored(0)]


@pytest.mark.parametrize("batch", [False, True])
def test_an_acquire_beyond_capacity_changes_nothing(batch: bool) -> None:
    kv = manager(4)
    for blocks in [roots(0, 1, 2, 3)] if batch else [[root(i)] for i in range(4)]:
        kv.acquire(blocks)
    kv.drain_events()
    refused(kv, CapacityExhausted, "only 0 of 4", lambda: kv.acquire([root(4)]))


def test_a_batch_as_large_as_the_pool_fits_and_one_block_more_does_not() -> None:
    kv = manager(10)
    assert kv.acquire(roots(*range(10))) == 10
    assert raw(kv) == [stored(*range(10))]
    refused(kv, CapacityExhausted, "are available", lambda: kv.acquire(roots(10)))


def test_a_failed_acquire_keeps_no_reference_on_its_hits() -> None:
    kv = manager(3)
    kv.acquire(tree(0, 1))
    kv.acquire(tree(10))
    kv.release(tree(1, 0))
    kv.drain_events()
    refused(kv, CapacityExhausted, "takes 4 .* only 2 of 3", lambda: kv.acquire(tree(0, 1, 2, 3)))
    assert kv.references(tree(0)[0]) == 0


def test_a_block_behind_a_miss_is_reused() -> None:
    kv = manager()
    kv.acquire(tree(0, 1, 2))
    kv.discard(tree(1))
    kv.release(tree(2, 0))
    kv.drain_events()
    kv.acquire(tree(0, 1, 2))
    assert raw(kv) == [stored(1, parent=0)]
    assert pools(kv) == (3, 0, 3)


def test_a_new_hash_named_twice_in_one_call_is_one_block_and_cuts_the_run() -> None:
    kv = manager(2)
    assert kv.acquire([*tree(0), *tree(0), *tree(1)]) == 3
    assert pools(kv) == (2, 0, 3)
    assert raw(kv) == [stored(0), stored(1, parent=0)]


def test_a_cached_hash_named_twice_in_one_call_needs_one_block() -> None:
    kv = manager(2)
    kv.acquire(tree(0))
    kv.release(tree(0))
    kv.drain_events()
    assert kv.acquire([*tree(0), *tree(0), *tree(1)]) == 3
    assert pools(kv) == (2, 0, 3)
    assert raw(kv) == [stored(1, parent=0)]


def test_a_partial_block_named_twice_is_held_once() -> None:
    kv = manager(2)
    assert kv.acquire([7, 7]) == 2
    assert kv.acquire([7]) == 1
    assert pools(kv) == (1, 0, 1)
    kv.release([7])
    assert pools(kv) == (0, 0, 0)


def test_with_partial_the_prefix_that_fits_is_kept_and_counted() -> None:
    kv = manager(4)
    kv.acquire(tree(0, 1))
    kv.drain_events()
    assert kv.acquire(tree(0, 1, 2, 3, 4), partial=True) == 4
    assert raw(kv) == [stored(2, 3, parent=1)]
    assert [kv.references(block) for block in tree(0, 1, 2, 3, 4)] == [2, 2, 1, 1, 0]
    assert kv.acquire(tree(10), partial=True) == 0
    assert kv.acquire(tree(4), partial=True) == 0


def test_with_partial_a_hit_behind_the_prefix_may_be_evicted_for_it() -> None:
    kv = manager(2)
    kv.acquire(tree(10, 13))
    kv.release(tree(13))
    kv.drain_events()
    assert kv.acquire([*tree(0), *tree(13)], partial=True) == 1
    assert raw(kv) == [stored(0), removed(13)]


def test_with_partial_a_partial_block_takes_a_slot_like_any_other() -> None:
    kv = manager(2)
    assert kv.acquire([*tree(0), 5, *tree(1)], partial=True) == 2
    assert kv.references(5) == 1


def test_acquiring_nothing_does_nothing() -> None:
    kv = manager()
    assert kv.acquire([]) == 0
    assert kv.acquire(Identities()) == 0
    kv.release([])
    kv.discard([])
    assert pools(kv) == (0, 0, 0)
    assert raw(kv) == []


# ── Release ──


def test_a_block_released_to_zero_is_found_again_without_a_second_stored() -> None:
    kv = manager(4)
    kv.acquire(tree(0))
    kv.release(tree(0))
    assert pools(kv) == (0, 1, 0)
    kv.acquire(tree(0))
    assert pools(kv) == (1, 0, 1)
    assert raw(kv) == [stored(0)]


def test_a_released_partial_block_is_free_and_not_cached() -> None:
    kv = manager(1)
    kv.acquire([9])
    kv.release([9])
    assert (kv.active_blocks, kv.inactive_blocks, kv.free_blocks) == (0, 0, 1)
    assert raw(kv) == []


def test_release_says_nothing() -> None:
    kv = manager()
    kv.acquire(tree(0, 1))
    kv.drain_events()
    kv.release(tree(1, 0))
    assert raw(kv) == []


def test_releasing_what_nobody_holds_changes_nothing() -> None:
    kv = manager()
    kv.acquire([*tree(0, 1), 3])
    kv.release(tree(1))
    kv.drain_events()
    refused(kv, WrongState, "held by nobody", lambda: kv.release([*tree(0), 3, *tree(1)]))
    refused(kv, UnknownBlock, "not here", lambda: kv.release([*tree(0), *tree(5)]))
    refused(kv, UnknownBlock, "partial block 4 is not held", lambda: kv.release([3, 4]))
    refused(kv, WrongState, "released but not referenced", lambda: kv.release([*tree(0), *tree(0)]))
    refused(kv, WrongState, "released but not referenced", lambda: kv.release([3, 3]))


# ── Seal ──


def test_a_sealed_partial_block_is_stored_where_it_is() -> None:
    kv = manager(2)
    kv.acquire([*tree(0), 1])
    kv.drain_events()
    kv.seal(1, tree(1)[0])
    assert raw(kv) == [stored(1, parent=0)]
    assert pools(kv) == (2, 0, 2)
    assert not kv.is_resident(1)
    kv.release(tree(1))
    assert pools(kv) == (1, 1, 1)


def test_sealing_into_an_active_block_frees_the_slot() -> None:
    kv = manager(2)
    kv.acquire([*tree(0), 1])
    kv.drain_events()
    kv.seal(1, tree(0)[0])
    assert raw(kv) == []
    assert pools(kv) == (1, 0, 2)


def test_sealing_into_an_inactive_block_reactivates_it() -> None:
    kv = manager(2)
    kv.acquire(tree(0))
    kv.release(tree(0))
    kv.acquire([1])
    kv.drain_events()
    kv.seal(1, tree(0)[0])
    assert raw(kv) == []
    assert (kv.active_blocks, kv.inactive_blocks, kv.free_blocks) == (1, 0, 1)


def test_sealing_an_unknown_partial_block_is_refused() -> None:
    kv = manager()
    refused(kv, UnknownBlock, "partial block 8 is not held", lambda: kv.seal(8, tree(0)[0]))


# ── Discard ──


def test_a_discarded_block_is_removed_once_and_stored_again() -> None:
    kv = manager()
    kv.acquire(tree(0, 1))
    kv.discard(tree(1))
    assert not kv.is_resident(tree(1)[0])
    assert pools(kv) == (1, 0, 1)
    kv.acquire(tree(1))
    assert raw(kv) == [stored(0, 1), removed(1), stored(1, parent=0)]


def test_several_discarded_blocks_are_one_removed() -> None:
    kv = manager()
    kv.acquire([*tree(0, 1, 2), 6])
    kv.drain_events()
    kv.discard([6, *tree(2, 1)])
    assert raw(kv) == [removed(2, 1)]
    assert pools(kv) == (1, 0, 1)


def test_a_block_discarded_under_other_holders_stays_theirs_and_is_found_by_nobody() -> None:
    kv = manager(2)
    for _ in range(3):
        kv.acquire(tree(0))
    kv.drain_events()
    kv.discard(tree(0))
    assert raw(kv) == [removed(0)]
    assert not kv.is_resident(tree(0)[0])
    assert pools(kv) == (1, 0, 2)
    assert kv.probe_new_blocks(tree(0)) == 1
    kv.check()

    kv.acquire(tree(0))  # anew, in the other slot
    assert raw(kv) == [stored(0)]
    assert pools(kv) == (2, 0, 3)
    refused(kv, CapacityExhausted, "are available", lambda: kv.acquire(tree(1)))

    kv.release(tree(0))
    assert pools(kv) == (2, 0, 2)
    kv.release(tree(0))  # the last of those from before: the slot is free, not cached
    assert (kv.active_blocks, kv.inactive_blocks, kv.free_blocks) == (1, 0, 1)
    kv.release(tree(0))
    assert (kv.active_blocks, kv.inactive_blocks, kv.free_blocks) == (0, 1, 1)
    assert raw(kv) == []
    kv.check()
    refused(kv, WrongState, "held by nobody", lambda: kv.release(tree(0)))


def test_a_second_holder_may_discard_too_without_a_second_removed() -> None:
    kv = manager()
    kv.acquire(tree(0))
    kv.acquire(tree(0))
    kv.drain_events()
    kv.discard(tree(0))
    kv.discard(tree(0))
    assert raw(kv) == [removed(0)]
    assert pools(kv) == (0, 0, 0)
    kv.check()


def test_only_held_blocks_can_be_discarded_each_once() -> None:
    kv = manager()
    kv.acquire(tree(0, 1))
    kv.acquire(tree(0))
    kv.release(tree(1))
    kv.drain_events()
    refused(kv, WrongState, "held by nobody", lambda: kv.discard(tree(0, 1)))
    refused(kv, UnknownBlock, "not here", lambda: kv.discard(tree(0, 2)))
    refused(kv, UnknownBlock, "not held", lambda: kv.discard([*tree(0), 4]))
    refused(kv, InvalidArgument, "twice", lambda: kv.discard([*tree(0), *tree(0)]))


# ── Whole scripts ──


def test_lifecycle_script_with_its_events() -> None:
    kv = manager(10, 16, eviction="lineage")
    kv.acquire(tree(0, 1, 2, 3, 4))
    assert raw(kv) == [stored(0, 1, 2, 3, 4)]
    assert pools(kv) == (5, 0, 5)

    kv.acquire(tree(0, 1, 5, 6))
    assert raw(kv) == [stored(5, 6, parent=1)]
    assert [kv.references(block) for block in tree(0, 1, 2, 3, 4, 5, 6)] == [2, 2, 1, 1, 1, 1, 1]

    kv.release(tree(4, 3, 2, 1, 0))
    assert raw(kv) == []
    assert pools(kv) == (4, 3, 4)
    assert inactive(kv) == {2, 3, 4}

    kv.release(tree(6, 5, 1, 0))
    assert raw(kv) == []
    assert inactive(kv) == {0, 1, 2, 3, 4, 5, 6}

    kv.acquire(tree(0, 1, 2, 7, 8, 9))
    assert raw(kv) == [stored(7, 8, 9, parent=2)]
    assert inactive(kv) == {3, 4, 5, 6}

    kv.acquire(tree(10, 11, 12))
    assert raw(kv) == [stored(10, 11, 12), removed(4, 3, 6)]
    assert inactive(kv) == {5}
    assert pools(kv) == (9, 1, 9)

    kv.acquire(tree(13))
    assert raw(kv) == [stored(13), removed(5)]
    assert inactive(kv) == set()
    assert pools(kv) == (10, 0, 10)
    kv.check()


def inactive(kv: KvManager) -> set[int]:
    """The numbers of the tree's blocks that are cached and unreferenced."""
    found = {n for n in range(14) if kv.is_resident(tree(n)[0]) and kv.references(tree(n)[0]) == 0}
    assert len(found) == kv.inactive_blocks
    return found


def test_lifecycle_with_discarded_tails() -> None:
    kv = manager(10, 16, eviction="lru")
    kv.acquire(tree(0, 1, 2, 3, 4))
    kv.acquire(tree(0, 1, 5, 6))
    assert [kv.references(block) for block in tree(0, 1, 2, 3, 4, 5, 6)] == [2, 2, 1, 1, 1, 1, 1]

    kv.discard(tree(4))
    kv.release(tree(0, 1, 2, 3))
    assert inactive(kv) == {2, 3}
    assert [kv.references(block) for block in tree(0, 1, 5, 6)] == [1, 1, 1, 1]

    kv.discard(tree(6))
    kv.release(tree(0, 1, 5))
    assert inactive(kv) == {0, 1, 2, 3, 5}
    assert kv.active_blocks == 0

    kv.acquire(tree(0, 1, 2, 7, 8, 9))
    assert inactive(kv) == {3, 5}
    assert kv.active_references == 6
    assert kv.probe_new_blocks(tree(0, 1, 2, 3, 4)) == 1

    kv.acquire(tree(10, 11, 12))
    assert inactive(kv) == {5}
    kv.acquire(tree(13))
    assert inactive(kv) == set()
    assert raw(kv) == [
        stored(0, 1, 2, 3, 4),
        stored(5, 6, parent=1),
        removed(4),
        removed(6),
        stored(7, 8, 9, parent=2),
        stored(10, 11, 12),
        removed(3),
        stored(13),
        removed(5),
    ]


@pytest.mark.parametrize("eviction", BUILT_IN_POLICIES)
def test_every_eviction_order_has_the_same_totals(eviction: str) -> None:
    kv = manager(4, 16, eviction=eviction)
    for i in range(4):
        kv.acquire([root(i)])
    for i in range(4):
        kv.release([root(i)])
    assert pools(kv) == (0, 4, 0)
    for i in range(10, 14):
        assert kv.acquire([root(i)]) == 1
    assert pools(kv) == (4, 0, 4)
    assert kv.metrics().evictions == 4
    assert {hash_ for kind, _, hashes in raw(kv) if kind == "removed" for hash_ in hashes} == {0, 1, 2, 3}


def test_multi_lru_spares_what_is_used_often() -> None:
    kv = manager(3, 16, eviction="multi_lru")
    for _ in range(6):
        kv.acquire([root(0)])
        kv.release([root(0)])
    kv.acquire(roots(1, 2))
    kv.release(roots(1, 2))
    kv.drain_events()
    kv.acquire(roots(3, 4))
    assert raw(kv) == [stored(3, 4), removed(1, 2)]


# ── Bad input ──


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (5, "blocks must be Identities or a sequence"),
        ([-1], r"blocks\[0\]"),
        ([3, "x"], r"blocks\[1\]"),
        ([2**64], r"blocks\[0\]"),
    ],
)
def test_bad_blocks_are_refused_by_every_call(blocks: Any, message: str) -> None:
    kv = manager()
    calls: list[Callable[[Any], object]] = [
        kv.acquire,
        kv.release,
        kv.discard,
        kv.probe_new_blocks,
        kv.overlap,
    ]
    for call in calls:
        refused(kv, InvalidArgument, message, partial(call, blocks))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_gpu_blocks": 0}, "num_gpu_blocks"),
        ({"block_size": 0}, "block_size"),
        ({"backend": "sglang"}, "backend must be kvbm or native"),
        ({"eviction": "magic"}, "'magic' is not known; choose one of lineage"),
        ({"backend": "native", "eviction": "lru"}, "eviction must be None"),
        ({"eviction": 3}, "eviction must be a name"),
        ({"event_token_ids": True}, "event_token_ids has no effect"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KvManager(**{"num_gpu_blocks": 4, "block_size": 16} | settings)

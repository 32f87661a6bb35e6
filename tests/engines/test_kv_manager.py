"""The kvbm KV manager: acquire, release and seal, and input that it refuses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from engines.kv_building import manager, pools, raw, refused, removed, root, roots, stored, tree
from understudy.errors import CapacityExhausted, ConfigError, InvalidArgument, UnknownBlock, WrongState
from understudy.kv.kv_manager import KvManager
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

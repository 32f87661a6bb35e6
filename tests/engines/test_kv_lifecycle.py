"""The kvbm KV manager: discarded blocks, and whole lives of blocks with their events."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engines.kv_building import manager, pools, raw, refused, removed, root, roots, stored, tree
from understudy.errors import CapacityExhausted, InvalidArgument, UnknownBlock, WrongState
from understudy.kv import BUILT_IN_POLICIES

if TYPE_CHECKING:
    from understudy.kv.kv_manager import KvManager

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

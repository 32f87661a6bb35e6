"""Lineage order: leaves first, by release (tick) or by arrival among the leaves (fifo)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from eviction.driver import Cache
from understudy.kv import BlockManager
from understudy.tokens import Identities, lineage_hash, lineage_parts

if TYPE_CHECKING:
    from understudy.core_types import PolicyName

BOTH: list[PolicyName] = ["lineage", "lineage_fifo"]


def evict_all(cache: Cache) -> str:
    """Evicts everything, and checks that the order was foretold."""
    cache.fill()
    foretold = cache.next_out()
    evicted = cache.take(cache.inactive())
    assert evicted == foretold
    return evicted


def evict_one_by_one(cache: Cache) -> str:
    cache.fill()
    return " ".join(cache.take(1) for _ in range(cache.inactive()))


# --- the worked traces ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lineage", "X2 X1 X0 Y2 Y1 Y0"), ("lineage_fifo", "X2 Y2 X1 Y1 X0 Y0")],
)
def test_two_chains_leave_one_after_the_other_by_tick_and_in_turns_by_fifo(
    policy: PolicyName, expected: str
) -> None:
    with Cache(policy, 8) as cache:
        cache.chain("X0 X1 X2")
        cache.chain("Y0 Y1 Y2")
        cache.insert("X0 X1 X2 Y0 Y1 Y2")
        assert evict_all(cache) == expected


@pytest.mark.parametrize("inserted", ["R0 R1 A2 A3 A4 B2 B3", "A4 A3 A2 B3 B2 R1 R0"])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lineage", "A4 A3 A2 B3 B2 R1 R0"), ("lineage_fifo", "A4 B3 A3 B2 A2 R1 R0")],
)
def test_branches_leave_before_their_shared_prefix(policy: PolicyName, expected: str, inserted: str) -> None:
    with Cache(policy, 8) as cache:
        cache.chain("R0 R1")
        cache.chain("A2 A3 A4", after="R1")
        cache.chain("B2 B3", after="R1")
        cache.insert(inserted)
        assert evict_all(cache) == expected


def test_the_mocker_tree_gives_up_the_released_branches() -> None:
    with Cache("lineage", 10) as cache:
        cache.chain("0 1 2 3 4")
        cache.chain("5 6", after="1")
        cache.chain("7 8 9", after="2")
        cache.store("0 1 2 3 4 5 6")
        cache.match("0 1")
        cache.release("4 3 2 1 0")
        cache.release("6 5 1 0")
        assert cache.match("0 1 2") == 3
        cache.store("7 8 9")
        assert cache.take(3) == "4 3 6"
        assert cache.take(1) == "5"
        assert cache.inactive() == 0


@pytest.mark.parametrize("policy", BOTH)
def test_a_resurrected_middle_block_comes_back_between_its_neighbours(policy: PolicyName) -> None:
    with Cache(policy, 4) as cache:
        cache.chain("X0 X1 X2")
        cache.insert("X0 X1 X2")
        cache.reuse("X1")
        assert evict_all(cache) == "X2 X1 X0"


# --- leaves, parents and ghosts -------------------------------------------------------------------


@pytest.mark.parametrize("policy", BOTH)
def test_a_lone_block_is_a_leaf(policy: PolicyName) -> None:
    with Cache(policy, 2) as cache:
        cache.chain("A")
        cache.insert("A")
        assert evict_all(cache) == "A"
        assert not cache.has("A")


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("inserted", ["P C", "C P"])
def test_a_child_goes_before_its_parent_in_whatever_order_they_came(
    policy: PolicyName, inserted: str
) -> None:
    with Cache(policy, 2) as cache:
        cache.chain("P C")
        cache.insert(inserted)
        assert cache.take(1) == "C"
        assert cache.has("P")
        assert cache.take(1) == "P"


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("inserted", ["P A B", "A P B", "B A P"])
def test_a_parent_of_two_waits_for_both_children(policy: PolicyName, inserted: str) -> None:
    with Cache(policy, 3) as cache:
        cache.chain("P A")
        cache.chain("B", after="P")
        cache.insert(inserted)
        gone = [cache.take(1), cache.take(1)]
        assert gone == [name for name in inserted.split() if name != "P"]
        assert cache.take(1) == "P"


@pytest.mark.parametrize("policy", BOTH)
def test_an_interior_block_in_use_keeps_its_ancestors_until_its_subtree_is_gone(policy: PolicyName) -> None:
    with Cache(policy, 4) as cache:
        cache.chain("X0 X1 X2")
        cache.chain("Y0")
        cache.insert("X0 X1 X2 Y0")
        assert cache.match("X1") == 1
        # X0 came before Y0, but X2 still hangs below the place that X1 left.
        assert cache.next_out() == ("X2 X0 Y0" if policy == "lineage" else "X2 Y0 X0")
        assert cache.take(1) == "X2"
        assert cache.take(2) == ("X0 Y0" if policy == "lineage" else "Y0 X0")


@pytest.mark.parametrize("policy", BOTH)
def test_an_active_parent_does_not_keep_its_inactive_child(policy: PolicyName) -> None:
    with Cache(policy, 2) as cache:
        cache.chain("P C")
        cache.store("P C")
        cache.release("C")
        assert cache.take(1) == "C"
        assert cache.inactive() == 0


@pytest.mark.parametrize("policy", BOTH)
def test_a_split_sequence_shows_two_leaves_at_all_times(policy: PolicyName) -> None:
    with Cache(policy, 8) as cache:
        cache.chain("P0 P1 A2 A3 A4")
        cache.chain("B2 B3 B4", after="P1")
        cache.insert("P0 P1 A2 A3 A4 B2 B3 B4")
        left = {"A": ["A2", "A3", "A4"], "B": ["B2", "B3", "B4"]}
        while left["A"] and left["B"]:
            out = cache.take(1)
            assert out == left[out[0]].pop()
        rest = (left["A"] or left["B"])[::-1]
        assert evict_one_by_one(cache).split() == [*rest, "P1", "P0"]


def test_interleaved_chains_leave_whole_by_tick() -> None:
    with Cache("lineage", 4) as cache:
        cache.chain("A B")
        cache.chain("X Y")
        cache.insert("A B X Y")
        assert evict_one_by_one(cache) == "B A Y X"


def test_interleaved_chains_leave_in_turns_by_fifo() -> None:
    with Cache("lineage_fifo", 4) as cache:
        cache.chain("A B")
        cache.chain("X Y")
        cache.insert("A B X Y")
        assert evict_one_by_one(cache) == "B Y A X"


def test_a_parent_that_is_a_leaf_again_goes_to_the_tail_by_fifo() -> None:
    with Cache("lineage_fifo", 4) as cache:
        cache.chain("A0 A1")
        cache.chain("B0 B1")
        cache.insert("A0 A1 B1")
        assert cache.match("A1") == 1
        assert cache.next_out() == "B1 A0"


def test_a_parent_that_is_a_leaf_again_returns_to_its_old_place_by_tick() -> None:
    with Cache("lineage", 4) as cache:
        cache.chain("A0 A1")
        cache.chain("B0 B1")
        cache.insert("A0 A1 B1")
        assert cache.match("A1") == 1
        assert cache.next_out() == "A0 B1"


@pytest.mark.parametrize("policy", BOTH)
def test_a_block_used_again_counts_as_released_last(policy: PolicyName) -> None:
    with Cache(policy, 3) as cache:
        for name in "ABC":
            cache.chain(name)
        cache.insert("A B C")
        cache.reuse("A")
        assert cache.next_out() == "B C A"
        cache.manager.touch(cache.known["B"])
        assert cache.next_out() == "C A B"


# --- scale ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", BOTH)
def test_a_chain_of_a_thousand_leaves_from_its_tail(policy: PolicyName) -> None:
    names = [f"D{depth}" for depth in range(1000)]
    with Cache(policy, 1000) as cache:
        cache.chain(" ".join(names))
        cache.insert(" ".join(names))
        assert cache.match("D999") == 1  # without its tail the chain still has one leaf
        assert cache.next_out().split() == names[998::-1]
        cache.release("D999")
        assert evict_all(cache).split() == names[::-1]


@pytest.mark.parametrize("policy", BOTH)
def test_a_lone_leaf_deep_down_leaves_no_ghosts_behind(policy: PolicyName) -> None:
    names = [f"D{depth}" for depth in range(101)]
    with Cache(policy, 101) as cache:
        cache.chain(" ".join(names))
        cache.insert(" ".join(names))
        for name in names[:100]:  # in use, from the root down: the graph is one leaf below 100 ghosts
            assert cache.match(name) == 1
        assert cache.next_out() == "D100"
        before = cache.manager.store.operations
        assert cache.match("D100") == 1
        pruned = cache.manager.store.operations - before
        assert pruned >= 101
        # Nothing is left to prune: the same block, alone, now costs a constant.
        before = cache.manager.store.operations
        cache.release("D100")
        assert cache.match("D100") == 1
        assert cache.manager.store.operations - before < 50
        cache.manager.store.check()


@pytest.mark.parametrize("policy", BOTH)
def test_slots_of_the_graph_are_recycled(policy: PolicyName) -> None:
    manager = BlockManager(64, policy=policy)
    sizes = []
    for round_ in range(20):
        run = Identities.from_local_hashes(range(1 + 1000 * round_, 65 + 1000 * round_))
        with manager.allocate(64) as blocks:
            assert len(blocks.evicted) == (64 if round_ else 0)
            blocks.register(run).release()
        sizes.append(manager.store.memory_bytes)
    assert len(set(sizes[1:])) == 1
    manager.store.check()


def test_a_recycled_place_is_ticked_anew() -> None:
    with Cache("lineage", 3) as cache:
        for name in "ABCD":
            cache.chain(name)
        cache.insert("A B C")
        assert cache.take(1) == "A"
        cache._taken.pop().release()
        cache.insert("D")
        assert evict_all(cache) == "B C D"


@pytest.mark.parametrize("policy", BOTH)
def test_unlinking_a_child_costs_the_same_among_ten_siblings_and_a_hundred_thousand(
    policy: PolicyName,
) -> None:
    cost = {}
    for siblings in (10, 100_000):
        root = Identities.from_local_hashes([7])
        parent = root.sequence_hashes[0]
        hashes = [lineage_hash(11 + 2 * i, int(parent), 1) for i in range(siblings)]
        children = Identities.from_lineage_hashes(hashes)
        manager = BlockManager(siblings + 1, policy=policy)
        manager.allocate(siblings + 1).register(root + children).release()
        # The oldest, the youngest and some between: matched and released again, then evicted.
        picked = [children[i : i + 1] for i in np.linspace(0, siblings - 1, 10).astype(int)]
        before = manager.store.operations
        for child in picked:
            manager.match_prefix(child).release()
        with manager.allocate(10) as blocks:
            assert len(blocks.evicted) == 10
            cost[siblings] = (manager.store.operations - before) / 20
    # A heap of the leaves, no list of the siblings.
    assert cost[100_000] - cost[10] <= 4 * math.log2(100_000 / 10)


# --- collisions -----------------------------------------------------------------------------------


def colliding(position: int) -> tuple[int, int]:
    """Two hashes at one position that their children could not tell apart by the fragment they keep."""
    bits = 54 if position + 1 < 2**8 else 46 if position + 1 < 2**16 else 38
    current = 0x123456789ABCDEF
    return lineage_hash(current, 99, position), lineage_hash(current ^ 1 << bits, 98, position)


@pytest.mark.parametrize("policy", BOTH)
@pytest.mark.parametrize("position", [1, 254, 255, 65_534, 65_535, 100_000])
def test_blocks_with_colliding_fragments_are_all_evicted_and_never_abort(
    policy: PolicyName, position: int
) -> None:
    first, second = colliding(position)
    child = lineage_hash(5, lineage_parts(first)[2], position + 1)
    assert child == lineage_hash(5, lineage_parts(second)[2], position + 1)
    with Cache(policy, 4) as cache:
        for name, plh in (("A", first), ("B", second), ("C", child)):
            cache.know(name, Identities.from_lineage_hashes([plh]))
        cache.insert("A B C")
        cache.manager.store.check()
        assert cache.next_out() == "C A B"
        cache.reuse("A")
        cache.manager.store.check()
        assert cache.next_out() == "C B A"
        assert evict_one_by_one(cache) == "C B A"
        cache.manager.store.check()


@pytest.mark.parametrize("policy", BOTH)
def test_a_lookup_tells_apart_equal_positions_and_fragments_with_different_full_hashes(
    policy: PolicyName,
) -> None:
    here = Identities.from_lineage_hashes([lineage_hash(5, 1, 3)])
    other = Identities.from_lineage_hashes([lineage_hash(5, 2, 3)])  # same position and hash, other parent
    manager = BlockManager(2, policy=policy)
    manager.allocate(1).register(here).release()
    assert manager.has_blocks(here + other).tolist() == [True, False]
    assert manager.prefix_length(other) == 0
    with manager.match_prefix(other) as matched, manager.scan(other) as scanned:
        assert (len(matched), len(scanned)) == (0, 0)
    scattered, mask = manager.match_scattered(other + here)
    with scattered:
        assert mask.tolist() == [False, True]
    # Side by side in the same place of the graph, each is found and evicted under its own name.
    manager.allocate(1).register(other).release()
    with manager.allocate(2) as blocks:
        assert blocks.evicted.lineage_hashes == here.lineage_hashes + other.lineage_hashes
    manager.store.check()


@pytest.mark.parametrize("policy", BOTH)
def test_many_collisions_at_one_place_leave_first_in_first_out(policy: PolicyName) -> None:
    hashes = [lineage_hash(5, parent, 3) for parent in range(1, 101)]
    manager = BlockManager(100, policy=policy)
    manager.allocate(100).register(Identities.from_lineage_hashes(hashes)).release(tail_first=False)
    before = manager.store.operations
    with manager.allocate(100) as blocks:
        assert blocks.evicted.lineage_hashes == hashes
        assert manager.store.operations - before < 100 * 10
    manager.store.check()


# --- copies side by side --------------------------------------------------------------------------


@pytest.mark.parametrize("policy", BOTH)
def test_copies_of_a_parent_all_wait_for_its_child(policy: PolicyName) -> None:
    with Cache(policy, 4, duplicates="keep") as cache:
        cache.chain("P C")
        cache.store("P C")
        cache.store("P")
        cache.release("P P C")
        cache.fill()
        assert cache.take(3) == "C P P"

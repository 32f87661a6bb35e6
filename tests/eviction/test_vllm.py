"""vLLM's one queue over empty and cached blocks, its older versions', and kvbm's empty-then-evict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from eviction.driver import Cache
from understudy.kv import BlockManager
from understudy.tokens import Identities

if TYPE_CHECKING:
    from understudy.core_types import PolicyName

KVBM: list[PolicyName] = ["lineage", "lineage_fifo", "lru", "multi_lru", "fifo"]
EVERY: list[PolicyName] = [*KVBM, "vllm", "vllm_append"]


def order(manager: BlockManager) -> list[int]:
    return [int(block) for block in manager.eviction_order()]


def chain(start: int, count: int) -> Identities:
    return Identities.from_local_hashes(range(start, start + count))


@pytest.mark.parametrize("policy", EVERY)
def test_a_fresh_pool_hands_out_its_blocks_by_number(policy: PolicyName) -> None:
    manager = BlockManager(5, policy=policy)
    assert order(manager) == [0, 1, 2, 3, 4]
    with manager.allocate(3) as first, manager.allocate(2) as second:
        assert [*first.ids, *second.ids] == [0, 1, 2, 3, 4]
        assert order(manager) == []


# --- vllm -----------------------------------------------------------------------------------------


def test_unkeyed_blocks_return_to_the_front_last_in_first_out() -> None:
    manager = BlockManager(6, policy="vllm")
    first, second = manager.allocate(2), manager.allocate(2)
    first.release()  # 0 1: the one at the highest position is the next to go
    assert order(manager) == [1, 0, 4, 5]
    second.release()
    assert order(manager) == [3, 2, 1, 0, 4, 5]


def test_with_no_block_keyed_the_queue_is_a_stack() -> None:
    manager = BlockManager(4, policy="vllm")
    for _ in range(3):
        with manager.allocate(1) as block:
            assert block.ids.tolist() == [0]
    with manager.allocate(4) as blocks:
        ids = blocks.ids.tolist()
    with manager.allocate(4) as blocks:
        assert blocks.ids.tolist() == ids[::-1]


def test_cached_blocks_go_least_recently_freed_first_and_tail_before_head() -> None:
    manager = BlockManager(6, policy="vllm", duplicates="keep")
    a = manager.allocate(3).register(chain(10, 3))
    b = manager.allocate(3).register(chain(20, 3))
    b.release()
    a.release()
    assert order(manager) == [5, 4, 3, 2, 1, 0]
    with manager.allocate(4) as blocks:
        expected = chain(20, 3).lineage_hashes[::-1] + chain(10, 3).lineage_hashes[2:]
        assert blocks.evicted.lineage_hashes == expected


def test_a_hit_leaves_the_queue_and_returns_to_its_end() -> None:
    manager = BlockManager(4, policy="vllm", duplicates="keep")
    manager.allocate(2).register(chain(10, 2)).release()
    manager.allocate(2).register(chain(20, 2)).release()
    assert order(manager) == [1, 0, 3, 2]
    hit = manager.match_prefix(chain(10, 2))
    assert order(manager) == [3, 2]
    hit.release()
    assert order(manager) == [3, 2, 1, 0]


def test_the_unkeyed_tail_of_a_request_goes_to_the_front_and_the_rest_to_the_end() -> None:
    manager = BlockManager(8, policy="vllm", duplicates="keep")
    blocks = manager.allocate(6)
    keyed = blocks.take(4).register(chain(10, 4))
    # As a request is freed: the partial tail first, in the same reversed order.
    blocks.release()
    keyed.release()
    assert order(manager) == [5, 4, 6, 7, 3, 2, 1, 0]


def test_never_filled_blocks_are_used_before_any_cached_one() -> None:
    with Cache("vllm", 4, duplicates="keep") as cache:
        cache.chain("A0 A1")
        cache.insert("A1 A0")
        assert cache.order() == ". . A1 A0"
        assert cache.take(2) == ""
        cache._taken.pop().release()
        assert cache.order() == ". . A1 A0"
        assert cache.take(3) == "A1"


def test_an_evicted_block_that_is_freed_unkeyed_goes_to_the_front() -> None:
    manager = BlockManager(3, policy="vllm", duplicates="keep")
    manager.allocate(3).register(chain(10, 3)).release()
    assert order(manager) == [2, 1, 0]
    with manager.allocate(2) as blocks:
        assert blocks.ids.tolist() == [2, 1]
    assert order(manager) == [1, 2, 0]


def test_blocks_forgotten_together_come_back_as_empty_ones_at_the_front() -> None:
    manager = BlockManager(4, policy="vllm", duplicates="keep")
    manager.allocate(2).register(chain(10, 2)).release()
    assert order(manager) == [2, 3, 1, 0]
    assert manager.clear_inactive() == 2
    assert order(manager) == [0, 1, 2, 3]
    manager.store.check()


def test_copies_of_one_block_are_evicted_each_in_its_turn() -> None:
    with Cache("vllm", 3, duplicates="keep") as cache:
        cache.chain("A")
        cache.chain("B")
        cache.store("A B")
        cache.store("A")
        cache.release("A B A")
        assert cache.take(1) == "A"
        assert cache.has("A")
        assert cache.take(2) == "B A"
        assert not cache.has("A")


# --- vllm_append: older versions ------------------------------------------------------------------


def test_older_versions_append_unkeyed_blocks_like_the_rest() -> None:
    manager = BlockManager(6, policy="vllm_append", duplicates="keep")
    blocks = manager.allocate(4)
    keyed = blocks.take(2).register(chain(10, 2))
    blocks.release()
    assert order(manager) == [4, 5, 3, 2]
    keyed.release()
    assert order(manager) == [4, 5, 3, 2, 1, 0]


def test_older_versions_evict_a_cached_block_before_an_empty_one_that_came_later() -> None:
    manager = BlockManager(3, policy="vllm_append", duplicates="keep")
    blocks = manager.allocate(3)
    keyed = blocks.take(1).register(chain(10, 1))
    keyed.release()
    blocks.release()
    assert order(manager) == [0, 2, 1]
    with manager.allocate(1) as taken:
        assert taken.evicted.lineage_hashes == chain(10, 1).lineage_hashes


# --- kvbm: empty blocks first, oldest first, then evict -------------------------------------------


@pytest.mark.parametrize("policy", KVBM)
def test_kvbm_hands_out_empty_blocks_first_in_first_out_before_it_evicts(policy: PolicyName) -> None:
    manager = BlockManager(6, policy=policy)
    empty, cached = manager.allocate(2), manager.allocate(2)
    cached.register(chain(10, 2)).release()
    assert order(manager) == [4, 5, 3, 2]
    empty.release()  # tail first, to the back of the empty ones, in front of all cached ones
    assert order(manager) == [4, 5, 1, 0, 3, 2]
    with manager.allocate(5) as blocks:
        assert blocks.ids.tolist() == [4, 5, 1, 0, 3]
        assert blocks.evicted.lineage_hashes == chain(10, 2).lineage_hashes[1:]
        metrics = manager.metrics()
        assert (metrics.allocations_from_reset, metrics.evictions) == (8, 1)


@pytest.mark.parametrize("policy", KVBM)
def test_what_was_evicted_matches_the_last_of_the_blocks_handed_out(policy: PolicyName) -> None:
    manager = BlockManager(4, policy=policy)
    manager.allocate(3).register(chain(10, 3)).release()
    with manager.allocate(4) as blocks:
        assert blocks.ids.tolist() == [3, 2, 1, 0]
        assert blocks.evicted.lineage_hashes == chain(10, 3).lineage_hashes[::-1]

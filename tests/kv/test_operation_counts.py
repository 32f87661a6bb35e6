"""The work per block does not grow with the pool: counted in index probes and policy steps, not in time."""

from __future__ import annotations

import math
import os
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest

from understudy.kv import BlockManager
from understudy.tokens import Identities

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from understudy.core_types import PolicyName

SIZES = [3_000, 30_000, 300_000]
HUGE = 10**7
T = TypeVar("T")
CONSTANT: list[PolicyName] = ["lru", "vllm", "vllm_append", "fifo", "multi_lru"]
LINEAGE: list[PolicyName] = ["lineage", "lineage_fifo"]
NOISE = 1.2  # the length of a probe depends a little on where the hashes fall


def one_chain(count: int) -> Identities:
    return Identities.from_local_hashes(np.arange(1, count + 1, dtype=np.uint64))


@cache
def many_leaves(count: int) -> tuple[Identities, Identities]:
    """Roots, every one a leaf; and the same in another order."""
    rng = np.random.default_rng(count)
    hashes = rng.integers(1, 2**63, count, dtype=np.uint64)
    orders = hashes.tolist(), rng.permutation(hashes).tolist()
    first, second = (Identities.from_lineage_hashes([h << 54 for h in order]) for order in orders)
    return first, second


@pytest.fixture(scope="session", autouse=True)
def _forget() -> Iterator[None]:
    """What the cache still held when the interpreter ends would look like a leak of the bindings."""
    yield
    many_leaves.cache_clear()


def operations_per_block(
    policy: PolicyName, blocks: Identities, matched: Identities | None = None
) -> dict[str, float]:
    """Of each kind of call on a pool that `blocks` fill; `matched` are the same in another order."""
    count = len(blocks)
    manager = BlockManager(count, policy=policy)
    found: dict[str, float] = {}

    def counted(name: str, work: Callable[[], T]) -> T:
        before = manager.store.operations
        result = work()
        found[name] = (manager.store.operations - before) / count
        return result

    held = counted("allocate and register", lambda: manager.allocate(count).register(blocks))
    counted("release", held.release)
    hit = counted("match", lambda: manager.match_prefix(matched or blocks))
    assert len(hit) == count
    hit.release()
    evicting = counted("evict", lambda: manager.allocate(count))
    assert len(evicting.evicted) == count
    evicting.release()
    return found


@pytest.mark.parametrize("policy", CONSTANT)
def test_lists_cost_the_same_per_block_in_a_pool_of_any_size(policy: PolicyName) -> None:
    small, *larger = [operations_per_block(policy, one_chain(size)) for size in SIZES]
    for large in larger:
        for name, operations in large.items():
            assert 0 < operations <= small[name] * NOISE, name


@pytest.mark.parametrize("policy", LINEAGE)
def test_lineage_costs_the_same_per_block_of_one_chain_of_any_length(policy: PolicyName) -> None:
    small, *larger = [operations_per_block(policy, one_chain(size)) for size in SIZES]
    for large in larger:
        for name, operations in large.items():
            assert 0 < operations <= small[name] * NOISE, name


@pytest.mark.soak
@pytest.mark.skipif(
    "UNDERSTUDY_SOAK_OPS" not in os.environ, reason="ten million blocks: only under `make soak`"
)
@pytest.mark.parametrize("policy", [*CONSTANT, *LINEAGE])
def test_ten_million_blocks_cost_no_more_each_than_three_thousand(policy: PolicyName) -> None:
    small, huge = (operations_per_block(policy, one_chain(size)) for size in (SIZES[0], HUGE))
    for name, operations in huge.items():
        assert 0 < operations <= small[name] * NOISE, name


@pytest.mark.parametrize("policy", LINEAGE)
def test_lineage_grows_at_most_like_the_logarithm_of_its_leaves(policy: PolicyName) -> None:
    sizes = SIZES  # a leaf of its own for every block
    small, *larger = [operations_per_block(policy, *many_leaves(size)) for size in sizes]
    for size, large in zip(sizes[1:], larger, strict=True):
        growth = math.log2(size) / math.log2(sizes[0])
        for name, operations in large.items():
            assert 0 < operations <= small[name] * NOISE * growth, name


@pytest.mark.parametrize("policy", [*CONSTANT, *LINEAGE])
def test_one_request_in_a_full_pool_costs_the_same_whatever_the_pool(policy: PolicyName) -> None:
    cost: dict[int, float] = {}
    for size in SIZES:
        manager = BlockManager(size, policy=policy)
        manager.allocate(size).register(one_chain(size)).release()
        before = manager.store.operations
        for request in range(32):
            start = 2 * 10**9 + 1000 * request
            run = Identities.from_local_hashes(np.arange(start, start + 16, dtype=np.uint64))
            assert manager.prefix_length(run) == 0
            manager.allocate(16).register(run).release()
            manager.match_prefix(run).release()
        cost[size] = (manager.store.operations - before) / (32 * 16)
    # A miss goes past the buckets that are full, and how many are varies by chance.
    assert max(cost.values()) <= 2 * min(cost.values())


@pytest.mark.parametrize("policy", [*CONSTANT, *LINEAGE])
def test_memory_per_block_stays_within_its_budget(policy: PolicyName) -> None:
    manager = BlockManager(10**5, policy=policy)
    manager.allocate(10**5).register(one_chain(10**5)).release()
    assert manager.store.memory_bytes / 10**5 <= 128

"""The numbers of a pool, and what its bookkeeping costs."""

from __future__ import annotations

import numpy as np
import pytest

from kv.building import AnyGuard, cache, chain, register
from model.block_manager import COUNTERS
from model.side_by_side import DUPLICATES, NATIVE_POLICIES, DuplicatesName, NativeName
from understudy.kv import BlockManager
from understudy.tokens import Identities, lineage_hash

GAUGES = (
    "total_blocks",
    "reset_blocks",
    "mutable_blocks",
    "staged_blocks",
    "active_blocks",
    "inactive_blocks",
    "active_references",
)


def test_a_snapshot_holds_every_counter_and_gauge_and_does_not_move() -> None:
    manager = BlockManager(4)
    before = manager.metrics()
    assert before.as_dict() == dict.fromkeys(COUNTERS, 0) | dict.fromkeys(GAUGES, 0) | {
        "total_blocks": 4,
        "reset_blocks": 4,
    }
    cache(manager, chain(2))
    assert before.allocations == 0
    after = manager.metrics()
    assert {name: getattr(after, name) for name in (*COUNTERS, *GAUGES)} == after.as_dict()
    assert (after.allocations, after.stagings, after.registrations, after.inactive_blocks) == (2, 2, 2, 2)


def test_blocks_and_references_are_counted_apart() -> None:
    manager = BlockManager(8)
    blocks = register(manager, chain(3))
    others = [manager.match_prefix(chain(2)), blocks.clone(), manager.match_scattered(chain(1) + chain(1))[0]]
    metrics = manager.metrics()
    assert metrics.active_blocks == 3
    assert metrics.active_references == 3 + 2 + 3 + 2
    for guard in [*others, blocks]:
        guard.release()
    metrics = manager.metrics()
    assert (metrics.active_blocks, metrics.active_references, metrics.inactive_blocks) == (0, 0, 3)


@pytest.mark.parametrize("duplicates", DUPLICATES)
def test_many_requests_with_one_prompt_hold_few_blocks_and_many_references(
    duplicates: DuplicatesName,
) -> None:
    manager = BlockManager(64, duplicates=duplicates)
    cache(manager, chain(4))
    requests = [manager.match_prefix(chain(4)) for _ in range(25)]
    assert manager.metrics().active_blocks == 4
    assert manager.metrics().active_references == 100
    assert manager.available == 60
    for request in requests:
        request.release()


def test_the_numbers_add_up_in_every_state() -> None:
    manager = BlockManager(12)
    guards: list[AnyGuard] = [
        manager.allocate(2),
        manager.allocate(3).stage(chain(3)),
        register(manager, chain(2, 2)),
        register(manager, chain(1, 2)),
    ]
    cache(manager, chain(2, 3))
    m = manager.metrics()
    assert (m.reset_blocks, m.mutable_blocks, m.staged_blocks, m.active_blocks, m.inactive_blocks) == (
        2,
        2,
        3,
        3,
        2,
    )
    assert m.total_blocks == 12
    assert manager.available == m.reset_blocks + m.inactive_blocks
    assert m.allocations == m.allocations_from_reset + m.evictions == 10
    assert m.stagings >= m.registrations == 5
    assert (m.duplicate_blocks, m.active_references) == (1, 4)
    for guard in guards:
        guard.release()
    m = manager.metrics()
    assert (m.mutable_blocks, m.staged_blocks, m.active_blocks, m.active_references) == (0, 0, 0, 0)
    assert m.reset_blocks + m.inactive_blocks == 12


def test_hits_and_misses_are_counted_apart_for_matches_and_scans() -> None:
    manager = BlockManager(8)
    cache(manager, chain(3))
    manager.match_prefix(chain(5)).release()
    manager.match_scattered(chain(4)[2:] + chain(1))[0].release()
    manager.scan(chain(5) + chain(5)).release()
    m = manager.metrics()
    assert (m.match_hashes_requested, m.match_blocks_returned) == (5 + 3, 3 + 2)
    assert (m.scan_hashes_requested, m.scan_blocks_returned) == (10, 3)


# --- memory ---------------------------------------------------------------------------------------

MANY = 250_000  # just below a power of two, where a table of blocks is fullest


def fill(manager: BlockManager, blocks_each: int, seed: int) -> None:
    """Registers chains until the pool is full of cached blocks."""
    for request in range(manager.num_blocks // blocks_each):
        first = (seed * MANY + request) * blocks_each + 1
        identities = Identities.from_local_hashes(np.arange(first, first + blocks_each, dtype=np.uint64))
        manager.allocate(blocks_each).register(identities).release()


@pytest.mark.parametrize("policy", NATIVE_POLICIES)
def test_many_blocks_cost_at_most_128_bytes_each(policy: NativeName) -> None:
    manager = BlockManager(MANY, policy=policy, events=True)
    assert manager.store.memory_bytes / MANY <= 128
    for seed in (1, 2):  # the second round evicts the first
        fill(manager, 2500, seed)
        manager.store.drain_events()
    assert manager.metrics().inactive_blocks == MANY
    assert 64 <= manager.store.memory_bytes / MANY <= 128


@pytest.mark.parametrize("policy", ["lineage", "lineage_fifo"])
def test_blocks_whose_parents_are_all_absent_cost_one_more_node_each(policy: NativeName) -> None:
    count = 100_000
    manager = BlockManager(count, policy=policy)
    # Unrelated blocks at position 1, each under a parent of its own: a node for the block and one for the parent.
    orphans = Identities.from_lineage_hashes([lineage_hash(h, h + 1, 1) for h in range(1, 3 * count, 3)])
    for _ in range(2):
        manager.allocate(count).register(orphans).release()
        assert manager.metrics().inactive_blocks == count
        assert manager.store.memory_bytes / count <= 192
    manager.clear_inactive()
    before = manager.store.memory_bytes
    manager.allocate(count).register(orphans).release()
    assert manager.store.memory_bytes == before  # nodes are used again

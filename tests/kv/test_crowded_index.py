"""Hashes that crowd into one bucket of the index lodge in others, and are found and forgotten like the rest."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from understudy.kv import BlockManager
from understudy.tokens import Identities

if TYPE_CHECKING:
    from understudy.core_types import PolicyName

SLOTS = 40
BUCKETS = SLOTS // 4 + 1
WORD = 2**64 - 1


def tag(sequence_hash: int) -> int:
    """Of a root, as the index computes it, so that a test can choose where it goes."""
    low, high = sequence_hash << 54 & WORD, sequence_hash >> 10
    return (low * 0x9E3779B97F4A7C15 + high * 0xD1B54A32D192ED03 & WORD) >> 32


def crowd(bucket: int, count: int, rng: random.Random, kind: int | None = None) -> list[Identities]:
    """Blocks whose place is one bucket of a pool of SLOTS, all with the same last bits of their tags if asked."""
    found: list[Identities] = []
    while len(found) < count:
        sequence_hash = rng.getrandbits(63) | 1
        own = tag(sequence_hash)
        if own * BUCKETS >> 32 == bucket and kind in (None, own % 32):
            found.append(Identities.from_lineage_hashes([sequence_hash << 54]))
    return found


def store(manager: BlockManager, block: Identities) -> None:
    manager.allocate(1).register(block).release()


def test_the_crowd_is_real() -> None:
    rng = random.Random(1)
    manager = BlockManager(SLOTS, policy="lru")
    blocks = crowd(5, SLOTS, rng)
    for block in blocks:
        store(manager, block)
    before = manager.store.operations
    assert all(manager.has_blocks(block).all() for block in blocks)
    assert manager.store.operations - before > 2 * SLOTS, "a search of lodged hashes goes past full buckets"


@pytest.mark.parametrize("bucket", [0, 5, BUCKETS - 1])
@pytest.mark.parametrize("policy", ["lru", "vllm", "lineage"])
def test_crowded_hashes_come_and_go(bucket: int, policy: PolicyName) -> None:
    rng = random.Random(bucket)
    manager = BlockManager(SLOTS, policy=policy)
    crowded = crowd(bucket, 3 * SLOTS, rng)
    others = crowd((bucket + 1) % BUCKETS, SLOTS, rng)
    there: list[Identities] = []  # least recently used first
    for _ in range(600):
        block = rng.choice(crowded + others)
        if block in there:
            manager.match_prefix(block).release()
            there.remove(block)
        else:
            store(manager, block)
            if len(there) == SLOTS:
                there.pop(0)
        there.append(block)
        if policy != "lineage":
            assert manager.has_blocks(block).all()
            probe = rng.choice(crowded)
            assert bool(manager.has_blocks(probe).all()) == (probe in there)
    manager.store.check()
    assert sum(int(manager.has_blocks(block).sum()) for block in crowded + others) == SLOTS


def test_a_search_ends_though_every_bucket_has_a_guest_elsewhere() -> None:
    rng = random.Random(7)
    manager = BlockManager(SLOTS, policy="lru")
    guests = []
    for bucket, fill in [(0, 32), (4, 31), (8, 23)]:
        for block in crowd(bucket, fill, rng):  # from this bucket to the next one of the three, all are full
            store(manager, block)
        guests.append(manager.allocate(1).register(crowd(bucket, 1, rng, kind=3)[0]))
        manager.clear_inactive()
    for block in crowd(0, 20, rng, kind=3):
        assert not manager.has_blocks(block).any()
    for guest in guests:
        assert manager.has_blocks(guest.identities).all()
        guest.release()
    manager.store.check()

"""A large pool whose blocks come and go: the index and the free list lose nothing, and keep nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from understudy.kv import BlockManager
from understudy.tokens import Identities

if TYPE_CHECKING:
    from understudy.core_types import PolicyName

POOL = 2000  # hundreds of buckets in the index, so that some overflow
ROUNDS = 12


def roots(hashes: list[int]) -> Identities:
    return Identities.from_lineage_hashes([h << 54 for h in hashes])


@pytest.mark.parametrize("policy", ["vllm", "vllm_append", "lru"])
def test_a_full_pool_that_churns_finds_its_blocks_and_no_others(policy: PolicyName) -> None:
    rng = np.random.default_rng(7)
    manager = BlockManager(POOL, policy=policy)
    resident: list[int] = []  # least recently released first
    gone: list[int] = []
    for _ in range(ROUNDS):
        fresh = [int(h) for h in rng.integers(1, 2**63, int(rng.integers(1, POOL)), dtype=np.uint64)]
        manager.allocate(len(fresh)).register(roots(fresh)).release()
        overflow = max(0, len(resident) + len(fresh) - POOL)
        gone += resident[:overflow]
        resident = resident[overflow:] + fresh[::-1]  # the tail of a run is released first
        # Used again, in another order: these now go last.
        used = [int(h) for h in rng.permutation(np.array(resident, np.uint64))[: len(resident) // 2]]
        found, hit = manager.match_scattered(roots(used))
        assert hit.all()
        found.release()
        again = set(used)
        resident = [h for h in resident if h not in again] + used[::-1]
        assert manager.has_blocks(roots(resident)).all()
        assert not gone or not manager.has_blocks(roots(gone)).any()
        manager.store.check()


def test_hits_without_evictions_never_exhaust_the_free_list() -> None:
    manager = BlockManager(8, policy="vllm")
    blocks = roots([1, 2, 3])
    manager.allocate(3).register(blocks).release()
    for turn in range(100):
        manager.match_prefix(roots([1])).release()
        manager.touch(roots([2, 2, 2, 3, 2][: turn % 6]))
        manager.store.check()
    assert manager.has_blocks(blocks).all()
    assert len(manager.eviction_order()) == 8

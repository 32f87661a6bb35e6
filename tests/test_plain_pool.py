"""The benchmark's plain-Python peer does the same work as the block manager, block for block."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model.plain_pool import PlainPool
from understudy.errors import CapacityExhausted
from understudy.kv import BlockManager, MutableBlocks, RegisteredBlocks
from understudy.tokens import Identities

NUM_BLOCKS = 12

# Few local hashes and short chains, so that prefixes are shared and hashes come back after their eviction.
chains = st.lists(st.integers(1, 3), min_size=1, max_size=5)


def hashes_of(identities: Identities) -> list[int]:
    return [int(sequence_hash) for sequence_hash in identities.sequence_hashes]


def ids_of(blocks: MutableBlocks | RegisteredBlocks) -> list[int]:
    return [int(block) for block in blocks.ids]


class SideBySide(RuleBasedStateMachine):
    """Random operations on both; the real manager with the policies that the plain pool implements."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, policy="vllm_append", duplicates="reject")
        self.plain = PlainPool(NUM_BLOCKS)
        self.mutable: list[MutableBlocks] = []
        self.held: list[RegisteredBlocks] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 1))
    def allocate(self, count: int) -> None:
        if count > self.plain.available:
            with pytest.raises(CapacityExhausted):
                self.manager.allocate(count)
            with pytest.raises(CapacityExhausted):
                self.plain.allocate(count)
            return
        blocks = self.manager.allocate(count)
        assert (ids_of(blocks), hashes_of(blocks.evicted)) == self.plain.allocate(count)
        self.mutable.append(blocks)

    @precondition(lambda self: self.mutable)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        # Drawing may end the example, so the guard stays in the list until all is drawn.
        index = data.draw(st.integers(0, len(self.mutable) - 1))
        blocks = self.mutable[index]
        local_hashes = data.draw(st.lists(st.integers(1, 3), min_size=len(blocks), max_size=len(blocks)))
        identities = Identities.from_local_hashes(local_hashes)
        taken = ids_of(self.mutable.pop(index))
        registered = blocks.register(identities)
        assert ids_of(registered) == self.plain.register(taken, hashes_of(identities))
        self.held.append(registered)

    @rule(local_hashes=chains)
    def match(self, local_hashes: list[int]) -> None:
        identities = Identities.from_local_hashes(local_hashes)
        matched = self.manager.match_prefix(identities)
        assert ids_of(matched) == self.plain.match(hashes_of(identities))
        self.held.append(matched)

    @precondition(lambda self: self.mutable or self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        guards: list[MutableBlocks | RegisteredBlocks] = [*self.mutable, *self.held]
        guard = guards[data.draw(st.integers(0, len(guards) - 1))]
        self.plain.release(ids_of(guard))
        guard.release()
        self.mutable = [blocks for blocks in self.mutable if blocks is not guard]
        self.held = [blocks for blocks in self.held if blocks is not guard]

    @invariant()
    def as_many_are_available(self) -> None:
        assert self.plain.available == self.manager.available

    def teardown(self) -> None:
        for blocks in self.mutable:
            blocks.release()
        for held in self.held:
            held.release()


TestPlainPool = SideBySide.TestCase
TestPlainPool.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)


def test_matching_again_and_again_does_not_grow_the_queue() -> None:
    plain = PlainPool(8)
    taken, _ = plain.allocate(8)
    plain.release(plain.register(taken, range(1, 9)))
    for _ in range(1000):
        plain.release(plain.match([3, 4]))
    assert len(plain._queue) <= 16
    assert plain.allocate(8) == ([7, 6, 5, 4, 1, 0, 3, 2], [8, 7, 6, 5, 2, 1, 4, 3])

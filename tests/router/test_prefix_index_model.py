"""The prefix index against an obvious one, through every call."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from model.prefix_index import TIERS, ModelIndex
from understudy.kv import Tier
from understudy.router import PrefixIndex

# Few hashes, so that they meet; some collide in their low or high bits.
HASHES = st.integers(0, 9).map(lambda i: i * (2**60 + 1)) | st.integers(0, 5).map(lambda i: i << 32)
BLOCKS = st.lists(HASHES, max_size=12)
WHO = st.tuples(st.sampled_from([0, 1, 7, 2**63]), st.integers(0, 1)) | st.tuples(
    st.integers(100, 190), st.just(0)
)
TIER = st.sampled_from(TIERS)
STEP_MS = st.sampled_from([0.0, 1.0, 10.0])


def buffer(hashes: list[int]) -> np.ndarray:
    return np.array(hashes, np.uint64)


class IndexMachine(RuleBasedStateMachine):
    @initialize(ttl_ms=st.none() | st.just(15.0), limit=st.none() | st.integers(1, 6), copies=st.booleans())
    def begin(self, ttl_ms: float | None, limit: int | None, copies: bool) -> None:
        if ttl_ms is not None or limit is not None:
            copies = False  # a view that ages has no copies to count
        self.index = PrefixIndex(ttl_ms=ttl_ms, max_worker_blocks=limit, counts_copies=copies)
        self.model = ModelIndex(ttl_ms, limit, copies)
        self.now_ms = 0.0

    @rule(who=WHO, tier=TIER, blocks=BLOCKS, step_ms=STEP_MS)
    def store(self, who: tuple[int, int], tier: int, blocks: list[int], step_ms: float) -> None:
        self.now_ms += step_ms
        self.model.expire(self.now_ms)
        self.index.expire(self.now_ms)
        before = len(self.model.rows())
        self.model.store(who, tier, blocks, self.now_ms)
        applied = self.index.store(
            who[0], buffer(blocks), dp_rank=who[1], tier=Tier(tier), now_ms=self.now_ms
        )
        assert applied.stored <= len(blocks)
        if self.model.max_blocks is None:
            assert applied.stored == len(self.model.rows()) - before

    @rule(who=WHO, tier=TIER, blocks=BLOCKS)
    def remove(self, who: tuple[int, int], tier: int, blocks: list[int]) -> None:
        unknown = self.model.remove(who, tier, blocks)
        applied = self.index.remove(who[0], buffer(blocks), dp_rank=who[1], tier=Tier(tier))
        assert applied.unknown.tolist() == unknown

    @rule(who=WHO, tier=st.none() | TIER)
    def clear(self, who: tuple[int, int], tier: int | None) -> None:
        self.model.clear(who, tier)
        self.index.clear(who[0], dp_rank=who[1], tier=None if tier is None else Tier(tier))

    @rule(who=WHO)
    def leave(self, who: tuple[int, int]) -> None:
        self.model.leave(who)
        self.index.remove_worker(who[0], who[1])
        assert who not in self.index.workers

    @rule(step_ms=STEP_MS)
    def expire(self, step_ms: float) -> None:
        self.now_ms += step_ms
        assert self.index.expire(self.now_ms) == self.model.expire(self.now_ms)

    @rule(prompt=BLOCKS)
    def find(self, prompt: list[int]) -> None:
        found = self.index.find(buffer(prompt))
        rows = dict(zip(found.workers, map(tuple, found.blocks.tolist()), strict=True))
        assert rows == self.model.find(prompt)
        early = self.index.find(buffer(prompt), early_exit=True)
        assert (early.blocks <= found.blocks).all()

    @rule(restore=st.booleans())
    def go_on_with_a_copy(self, restore: bool) -> None:
        if self.model.ttl_ms is not None or self.model.max_blocks is not None or self.model.copies:
            return  # ages and copies are the next test's
        copy = PrefixIndex()
        if restore:
            copy.restore(self.index.snapshot())
        else:
            copy.load(self.index.dump())
            for worker, rank in self.index.workers:  # a dump knows only those who hold something
                copy.store(worker, buffer([]), dp_rank=rank)
        self.index = copy

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        self.index.check()
        dump = self.index.dump()
        columns = (dump.workers, dump.dp_ranks, dump.tiers, dump.hashes)
        assert list(zip(*(c.tolist() for c in columns), strict=True)) == self.model.rows()
        assert len(self.index) == len({row[3] for row in self.model.rows()})
        assert set(self.index.workers) == set(self.model.held)


IndexMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase

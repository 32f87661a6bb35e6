"""A consumer that drains while others register and evict the same hashes never sees events the wrong way round."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest

from threads import run_together
from understudy.errors import CapacityExhausted
from understudy.events import EventsLost, KvEvent, Stored, decode
from understudy.kv import BlockManager, BlockStore, PoolConfig, Tier
from understudy.tokens import Identities

if TYPE_CHECKING:
    from understudy.core_types import DuplicatePolicyName

# Long enough that most calls run without the GIL.
PROMPTS = [Identities.from_local_hashes(range(1000 * p + 1, 1000 * p + 81)) for p in range(4)]
ROUNDS = 400


def churn(manager: BlockManager, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(ROUNDS):
        prompt = rng.choice(PROMPTS)[: rng.randint(1, 80)]
        with manager.match_prefix(prompt) as hit:
            try:
                fresh = manager.allocate(len(prompt) - len(hit))
            except CapacityExhausted:
                continue
            fresh.register(prompt[len(hit) :]).release()
        if rng.random() < 0.05:
            manager.clear_inactive()


class Follower:
    """Follows the stream as an index would, and fails at the first event that contradicts an earlier one."""

    def __init__(self) -> None:
        self.present: dict[tuple[Tier, int], int] = {}  # generation by (tier, hash)
        self.last_generation: dict[tuple[Tier, int], int] = {}
        self.last_id = -1
        self.rows = 0

    def follow(self, events: list[KvEvent]) -> None:
        for event in events:
            assert not isinstance(event, EventsLost)
            assert event.event_id > self.last_id
            self.last_id = event.event_id
            for block in event.blocks:
                self.rows += 1
                key = (event.tier, block.sequence_hash)
                if isinstance(event, Stored):
                    assert key not in self.present, "stored twice"
                    assert block.generation > self.last_generation.get(key, 0)
                    self.present[key] = self.last_generation[key] = block.generation
                else:
                    assert self.present.pop(key, None) == block.generation, "removed what was not stored"


@pytest.mark.parametrize("duplicates", ["allow", "reject", "keep"])
def test_two_producers_and_a_consumer_agree_on_the_order_of_events(duplicates: DuplicatePolicyName) -> None:
    store = BlockStore(
        [
            PoolConfig(190, tier=Tier.G1, policy="lru", duplicates=duplicates),
            PoolConfig(170, tier=Tier.G2, policy="lineage", duplicates=duplicates),
        ],
        events=True,
    )
    follower = Follower()
    producing = [Tier.G1, Tier.G1, Tier.G2, Tier.G2]

    def produce(seed: int, tier: Tier) -> None:
        try:
            churn(store.manager(tier), seed)
        finally:
            producing.remove(tier)

    def consume() -> None:
        while producing:
            follower.follow(decode(store.drain_events(), dp_rank=0, block_size=16, stream="consolidated"))

    run_together(consume, *(partial(produce, seed, tier) for seed, tier in enumerate(tuple(producing))))
    follower.follow(decode(store.drain_events(), dp_rank=0, block_size=16, stream="consolidated"))

    # The view of the follower is that of the store, and both saw real churn.
    assert follower.rows > 10_000
    for tier in (Tier.G1, Tier.G2):
        everything = sum(PROMPTS, Identities())
        there = store.manager(tier).has_blocks(everything)
        here = [(tier, int(h)) in follower.present for h in everything.sequence_hashes]
        assert there.tolist() == here
    store.check()

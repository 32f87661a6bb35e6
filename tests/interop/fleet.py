"""Four workers with real tokens: what they hold, and what they said about it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from understudy.events import EventsLost, decode
from understudy.kv import BlockManager
from understudy.tokens import TokenBlocks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.events import Removed, Stored

SIZE = 16
WORKERS = 4


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Turns of conversations: each prompt continues one before it, or begins anew."""
    source = random.Random(seed)
    told: list[list[int]] = []
    for _ in range(count):
        begun = source.choice(told) if told and source.random() < 0.7 else []
        kept = begun[: source.randrange(len(begun) + 1)]
        told.append([*kept, *(source.randrange(150_000) for _ in range(source.randrange(20, 200)))])
    return told


class Worker:
    """A block manager that computes prompts and forgets the oldest when it is full."""

    def __init__(self, blocks: int) -> None:
        self.manager = BlockManager(
            blocks, policy="lineage", block_size=SIZE, events=True, event_token_ids=True
        )

    def serve(self, prompt: list[int]) -> Iterator[Stored | Removed]:
        """Compute what is not there; what was said meanwhile."""
        identities = TokenBlocks(prompt, SIZE).identities
        held = self.manager.match_prefix(identities)
        found = len(held)
        if found < len(identities):
            tokens = prompt[found * SIZE : len(identities) * SIZE]
            self.manager.allocate(len(identities) - found).register(identities[found:], tokens).release()
        held.release()
        batch = self.manager.store.drain_events()
        for event in decode(batch, dp_rank=0, block_size=SIZE, stream="consolidated"):
            assert not isinstance(event, EventsLost)
            yield event

    def holds(self, prompt: list[int]) -> int:
        """Leading blocks of the prompt that are there."""
        return self.manager.prefix_length(TokenBlocks(prompt, SIZE).identities)

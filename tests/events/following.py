"""Publishers and subscribers on this machine, and the plainest index that can follow them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from understudy.events.columns import EventKind
from understudy.events.publisher import Publisher
from understudy.events.subscriber import Subscriber
from understudy.events.wire import BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 4


def stored(*hashes: int, parent: int | None = None, medium: str | None = "GPU") -> BlockStored:
    tokens = [token for value in hashes for token in range(value % 1000, value % 1000 + SIZE)]
    return BlockStored(list(hashes), parent, tokens, SIZE, medium=medium)


def removed(*hashes: int, medium: str | None = "GPU") -> BlockRemoved:
    return BlockRemoved(list(hashes), medium)


class PlainView:
    """Tier and hash of every block that a subscriber told of."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.blocks: set[tuple[int, int]] = set()
        self.clears = 0

    def poll(self, timeout_ms: int = 20) -> None:
        update = self.subscriber.poll(timeout_ms)
        if update is not None:
            update.columns.check()
            self.take(update.columns)

    def take(self, columns: Any) -> None:
        offsets = columns.offsets.tolist()
        for i, (kind, tier) in enumerate(zip(columns.kinds.tolist(), columns.tiers.tolist(), strict=True)):
            told = {(tier, value) for value in columns.sequence_hashes[offsets[i] : offsets[i + 1]].tolist()}
            if kind == EventKind.CLEARED:
                self.blocks.clear()
                self.clears += 1
            elif kind == EventKind.STORED:
                self.blocks |= told
            else:
                self.blocks -= told

    def until(self, done: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, (
                self.subscriber.state,
                self.subscriber.counters,
                len(self.blocks),
            )
            self.poll()

    @property
    def hashes(self) -> set[int]:
        return {value for _, value in self.blocks}


def publisher(endpoint: str = "tcp://*:0", **options: Any) -> Publisher:
    settings: dict[str, Any] = {"replay": "tcp://*:0", "buffer_steps": 1000}
    return Publisher(endpoint, **(settings | options))


def reachable(endpoint: str | None) -> str:
    assert endpoint is not None
    return endpoint.replace("0.0.0.0", "127.0.0.1")


def follow(source: Publisher, *, replay: bool = True, **options: Any) -> PlainView:
    return PlainView(
        Subscriber(reachable(source.endpoint), replay=reachable(source.replay) if replay else None, **options)
    )

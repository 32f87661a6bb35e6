"""Small pools with events, and short ways to write what they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from understudy.events import EventsLost, KvEvent, decode
from understudy.kv import BlockManager, BlockStore
from understudy.tokens import Identities

if TYPE_CHECKING:
    from understudy.core_types import PolicyName

BLOCK_SIZE = 4


def chain(start: int, count: int, parent: Identities | None = None) -> Identities:
    return Identities.from_local_hashes(range(start, start + count), parent=parent)


def manager_of(num_blocks: int, policy: PolicyName = "lineage", **options: object) -> BlockManager:
    return BlockManager(num_blocks, policy=policy, block_size=BLOCK_SIZE, events=True, **options)  # type: ignore[arg-type]


def drained(
    source: BlockManager | BlockStore, stream: Literal["raw", "consolidated"] = "consolidated"
) -> list[KvEvent]:
    store = source.store if isinstance(source, BlockManager) else source
    return decode(store.drain_events(), dp_rank=store.dp_rank, block_size=BLOCK_SIZE, stream=stream)


def hashes(event: KvEvent) -> list[int]:
    assert not isinstance(event, EventsLost)
    return [block.sequence_hash for block in event.blocks]


def told(events: list[KvEvent]) -> list[tuple[str, list[int]]]:
    return [(type(event).__name__, hashes(event)) for event in events]

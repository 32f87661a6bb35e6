"""What a publisher has said and not taken back: the blocks that a dump tells of."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias

from understudy.events.wire import AllBlocksCleared, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from understudy.events.wire import Hash, WireEvent

_Place: TypeAlias = tuple[str | None, int | None]  # medium and cache group


class Mirror:
    """The blocks of one publisher, kept from its own events; as large as what it holds."""

    def __init__(self) -> None:
        # By place and hash: the event that told of the block; of further copies, those that told of them.
        self._blocks: dict[_Place, dict[Hash, BlockStored]] = {}
        self._copies: dict[tuple[_Place, Hash], list[BlockStored]] = {}

    def apply(self, events: Iterable[WireEvent]) -> None:
        """Take note of what is published."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._blocks.clear()
                self._copies.clear()
                continue
            place = (event.medium, event.group_idx)
            here = self._blocks.setdefault(place, {})
            if isinstance(event, BlockRemoved):
                self._remove(place, here, event.block_hashes)
            elif here.keys().isdisjoint(event.block_hashes):
                here.update(zip(event.block_hashes, repeat(event)))
            else:
                for value in event.block_hashes:
                    if value in here:
                        self._copies.setdefault((place, value), []).append(event)
                    else:
                        here[value] = event

    def _remove(self, place: _Place, here: dict[Hash, BlockStored], hashes: Iterable[Hash]) -> None:
        for value in hashes:
            copies = self._copies.get((place, value)) if self._copies else None
            if copies is None:
                here.pop(value, None)
            else:
                copies.pop()
                if not copies:
                    del self._copies[place, value]

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def dump(self) -> Iterator[BlockStored]:
        """Every copy of every block, a block an event, parents before their children where they are there."""
        for place, here in self._blocks.items():
            told: set[Hash] = set()
            for value in here:
                line = [value]
                while line[-1] not in told:  # up to the nearest ancestor that was told, or is not there
                    parent = _parent(here[line[-1]], line[-1])
                    if parent is None or parent not in here or parent in line:
                        break
                    line.append(parent)
                for each in reversed(line):
                    if each not in told:
                        told.add(each)
                        copies = self._copies.get((place, each), [])
                        yield from (_alone(event, each) for event in (here[each], *copies))


def _parent(event: BlockStored, value: Hash) -> Hash | None:
    index = event.block_hashes.index(value)
    return event.block_hashes[index - 1] if index else event.parent_block_hash


def _alone(event: BlockStored, value: Hash) -> BlockStored:
    """The event that would have told of this block alone."""
    index = event.block_hashes.index(value)
    size = event.block_size
    fits = len(event.token_ids) == size * len(event.block_hashes)
    extra = event.extra_keys
    return BlockStored(
        [event.block_hashes[index]],
        _parent(event, value),
        event.token_ids[index * size : (index + 1) * size] if fits else [],
        size,
        event.lora_id,
        event.medium,
        event.lora_name,
        [extra[index]] if extra and index < len(extra) else None,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.kv_cache_spec_sliding_window,
        event.locality,
        event.ownership,
        event.session_id,
        event.cache_salt,
    )

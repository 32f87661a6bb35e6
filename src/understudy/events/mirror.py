"""Blocks that a publisher has stored and not removed: the content of a dump."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, TypeAlias

from understudy.events.wire import AllBlocksCleared, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from understudy.events.wire import Hash, WireEvent

_Place: TypeAlias = tuple[str | None, int | None]  # medium and cache group


class Mirror:
    """Track the blocks of one publisher from its own events; memory grows with the number of blocks."""

    def __init__(self) -> None:
        # By place and hash: the event that stored the block, and those that stored further copies.
        self._blocks: dict[_Place, dict[Hash, BlockStored]] = {}
        self._copies: dict[tuple[_Place, Hash], list[BlockStored]] = {}

    def apply(self, events: Iterable[WireEvent]) -> None:
        """Apply published events in order."""
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
        """Yield one event per copy of every block, each parent before its children."""
        for place, here in self._blocks.items():
            done: set[Hash] = set()
            for value in here:
                line = [value]
                while line[-1] not in done:  # up to the nearest ancestor that was yielded, or is not stored
                    parent = _parent(here[line[-1]], line[-1])
                    if parent is None or parent not in here or parent in line:
                        break
                    line.append(parent)
                for each in reversed(line):
                    if each not in done:
                        done.add(each)
                        copies = self._copies.get((place, each), [])
                        yield from (_extract_block(event, each) for event in (here[each], *copies))


def _parent(event: BlockStored, value: Hash) -> Hash | None:
    index = event.block_hashes.index(value)
    return event.block_hashes[index - 1] if index else event.parent_block_hash


def _extract_block(event: BlockStored, value: Hash) -> BlockStored:
    """Build the event that stores only this block of `event`."""
    index = event.block_hashes.index(value)
    size = event.block_size
    fits = len(event.token_ids) == size * len(event.block_hashes)
    extra, ahead = event.extra_keys, event.lookahead_token_ids
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
        [ahead[index]] if ahead and index < len(ahead) else None,
    )

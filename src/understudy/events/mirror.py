"""What a publisher has said and not taken back: the blocks that a dump tells of."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from understudy.events.wire import AllBlocksCleared, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from understudy.events.wire import Hash, WireEvent

_Place: TypeAlias = tuple[str | None, int | None]  # medium and cache group


class Mirror:
    """The blocks of one publisher, kept from its own events; as large as what it holds."""

    def __init__(self) -> None:
        # By place and hash: the events that told of the block's copies, and where in them it stands.
        self._blocks: dict[_Place, dict[Hash, list[tuple[BlockStored, int]]]] = {}

    def apply(self, events: Iterable[WireEvent]) -> None:
        """Take note of what is published."""
        for event in events:
            if isinstance(event, BlockStored):
                here = self._blocks.setdefault((event.medium, event.group_idx), {})
                for index, value in enumerate(event.block_hashes):
                    here.setdefault(value, []).append((event, index))
            elif isinstance(event, BlockRemoved):
                here = self._blocks.get((event.medium, event.group_idx), {})
                for value in event.block_hashes:
                    if copies := here.get(value):
                        copies.pop()
                        if not copies:
                            del here[value]
            else:
                assert isinstance(event, AllBlocksCleared)
                self._blocks.clear()

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def dump(self) -> Iterator[BlockStored]:
        """Every copy of every block, a block an event, parents before their children where they are there."""
        for here in self._blocks.values():
            told: set[Hash] = set()
            for value in here:
                line = [value]
                while line[-1] not in told:  # up to the nearest ancestor that was told, or is not there
                    parent = _parent(*here[line[-1]][0])
                    if parent is None or parent not in here or parent in line:
                        break
                    line.append(parent)
                for each in reversed(line):
                    if each not in told:
                        told.add(each)
                        yield from (_alone(event, index) for event, index in here[each])


def _parent(event: BlockStored, index: int) -> Hash | None:
    return event.block_hashes[index - 1] if index else event.parent_block_hash


def _alone(event: BlockStored, index: int) -> BlockStored:
    """The event that would have told of this block alone."""
    size = event.block_size
    fits = len(event.token_ids) == size * len(event.block_hashes)
    extra = event.extra_keys
    return BlockStored(
        [event.block_hashes[index]],
        _parent(event, index),
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

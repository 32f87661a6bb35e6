"""The KV blocks of the vLLM scheduler model: free list, prefix index, KV events.

A block's key is the number of its content in the order in which stored events first named it; the content is
the tokens of the block and of all blocks before it. So equal keys mean equal prefixes, and events need no
translation.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .vllm_config import Config, Profile
    from .vllm_format import KvEvent


@dataclass(eq=False, slots=True)
class Block:
    """One physical block."""

    id: int
    refs: int = 0
    key: int | None = None
    phantom: bool = False  # carries a key, but the step that should have computed it was undone


class BlockPool:
    """All blocks but block 0, which vLLM never hands out."""

    def __init__(self, config: Config, profile: Profile) -> None:
        self.block_size = config.block_size
        self.caching = config.enable_prefix_caching
        self.profile = profile
        self.blocks = [Block(block_id) for block_id in range(1, config.num_blocks)]
        # Front = handed out next. Holds exactly the blocks with no reference.
        self.free: OrderedDict[int, Block] = OrderedDict((block.id, block) for block in self.blocks)
        # Key -> the blocks that carry it, in the order they got it.
        self.index: dict[int, dict[int, Block]] = {}
        # (key of the block before, tokens of this block) -> key
        self.contents: dict[tuple[int | None, tuple[int, ...]], int] = {}
        self.events: list[KvEvent] = []

    def free_count(self) -> int:
        return len(self.free)

    def free_head(self, count: int) -> list[int]:
        return list(islice(self.free, count))

    def find(self, tokens: Sequence[int], root: int | None = None) -> list[Block]:
        """The cached blocks at the start of `tokens`, always leaving at least one token. Changes nothing."""
        found: list[Block] = []
        if not self.caching:
            return found
        key = root
        for position in range((len(tokens) - 1) // self.block_size):
            key = self.contents.get((key, self._block_tokens(tokens, position)))
            if key is None or key not in self.index:
                break
            found.append(next(iter(self.index[key].values())))
        return found

    def take_hits(self, hits: Sequence[Block]) -> None:
        """Add a reference to each; those nobody held leave the free list."""
        for block in hits:
            if block.refs == 0:
                del self.free[block.id]
            block.refs += 1

    def take_free(self, count: int) -> list[Block]:
        """Hand out blocks from the front. One that is still cached is evicted, with a removed event."""
        taken = []
        for _ in range(count):
            _, block = self.free.popitem(last=False)
            if block.key is not None:
                self.remove_key(block)
            block.refs = 1
            taken.append(block)
        return taken

    def store(
        self, table: Sequence[Block], tokens: Sequence[int], first: int, end: int, root: int | None = None
    ) -> None:
        """Give blocks first … end − 1 of `table` their keys, with one stored event (end > first)."""
        parent = table[first - 1].key if first > 0 else None
        key = parent if first > 0 else root
        stored = []
        for position in range(first, end):
            content = (key, self._block_tokens(tokens, position))
            key = self.contents.setdefault(content, len(self.contents))
            block = table[position]
            block.key = key
            self.index.setdefault(key, {})[block.id] = block
            stored.append(key)
        self.events.append(
            {
                "type": "stored",
                "n": len(stored),
                "h": stored,
                "parent": parent,
                "pos": first * self.block_size,
                "first_tokens": [tokens[position * self.block_size] for position in range(first, end)],
            }
        )

    def remove_key(self, block: Block) -> None:
        """Take the block out of the index, with a removed event even if another block has the same key."""
        assert block.key is not None
        carriers = self.index[block.key]
        del carriers[block.id]
        if not carriers:
            del self.index[block.key]
        self.events.append({"type": "removed", "n": 1, "h": [block.key]})
        block.key = None
        block.phantom = False

    def release(self, table: Sequence[Block]) -> None:
        """Drop one reference to each, last block first; the free list's order depends on the profile."""
        to_front: list[Block] = []
        to_end: list[Block] = []
        order = self.profile.free_order
        unkeyed_last = order == "all_last" or (order == "uncached_last" and not self.caching)
        for block in reversed(table):
            block.refs -= 1
            if block.refs == 0:
                (to_end if unkeyed_last or block.key is not None else to_front).append(block)
        for block in reversed(to_front):  # as a group: the first of to_front becomes the very front
            self.free[block.id] = block
            self.free.move_to_end(block.id, last=False)
        for block in to_end:
            self.free[block.id] = block

    def publish(self) -> list[KvEvent]:
        """Hand over all events since the last call, neighbouring removed events merged."""
        merged: list[KvEvent] = []
        for event in self.events:
            if event["type"] == "removed" and merged and merged[-1]["type"] == "removed":
                merged[-1]["h"] += event["h"]
                merged[-1]["n"] += event["n"]
            else:
                merged.append(event)
        self.events = []
        return merged

    def _block_tokens(self, tokens: Sequence[int], position: int) -> tuple[int, ...]:
        return tuple(tokens[position * self.block_size : (position + 1) * self.block_size])

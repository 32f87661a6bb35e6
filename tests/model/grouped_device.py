"""Parts of the slow model of several KV groups with tiers: sizes, blocks of the device, and a tier below it."""

from __future__ import annotations

import math
from dataclasses import dataclass

Key = tuple[int, int, int]
"""Group, end in tokens, content."""


@dataclass(frozen=True)
class Group:
    """Sizes in tokens; full attention unless `kind`, `window` or `chunk` says otherwise."""

    block: int
    window: int = 0
    chunk: int = 0
    kind: str = ""
    checkpoint: bool = False

    @property
    def name(self) -> str:
        derived = "sliding_window" if self.window else "chunked_local" if self.chunk else "full"
        return self.kind or derived

    @property
    def is_full(self) -> bool:
        return self.name in ("full", "rswa")

    @property
    def is_state(self) -> bool:
        return self.name == "mamba"

    @property
    def is_cached(self) -> bool:
        return self.name not in ("circular", "sliding_window_mla")

    @property
    def slides(self) -> bool:
        return self.name in ("sliding_window", "sliding_window_mla")

    @property
    def window_blocks(self) -> int:
        return -(-(self.window - 1) // self.block)

    def first_needed(self, tokens: int) -> int:
        """Return the first block that a token behind `tokens` tokens reads."""
        if self.slides:
            return max(0, tokens - self.window + 1) // self.block
        if self.is_state:
            return max(0, tokens - 1) // self.block
        return tokens // self.chunk * self.chunk // self.block if self.chunk else 0


class Sizes:
    """Units that follow from the groups; `match_unit` replaces the unit of hashing."""

    def __init__(self, groups: list[Group], match_unit: int = 0) -> None:
        cached = [group for group in groups if group.is_cached]
        self.common = math.lcm(*(group.block for group in groups))
        self.hash = match_unit or math.gcd(*(group.block for group in cached))
        self.block = min(group.block for group in cached)
        self.partial = any(group.is_state and group.block > self.hash for group in cached) and all(
            group.is_full or group.is_state or group.block == self.hash for group in cached
        )
        self.hit = self.hash if self.partial else self.common
        self.replay = max((group.window for group in groups if group.name == "sliding_window_mla"), default=0)
        self.kinds: list[list[int]] = []
        for full in (True, False):
            for g, group in enumerate(groups):
                if not group.is_cached or group.is_full != full:
                    continue
                equal = next((kind for kind in self.kinds if groups[kind[0]] == group), None)
                if equal is None:
                    self.kinds.append([g])
                else:
                    equal.append(g)

    def is_found_by(self, group: Group, end: int) -> bool:
        """Return whether lookups can find a block of the group by a key of `end`."""
        return self.partial or end % group.block == 0


class Block:
    """A block of the device; free when no reference is left."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.refs = 1

    def has_end(self, end: int) -> bool:
        return any(key[1] == end for key in self.keys)


class Device:
    """Blocks without a key are taken before cached ones, and those from the least recently released on."""

    def __init__(self, blocks: int, groups: list[Group], sizes: Sizes) -> None:
        self.empty = blocks
        self.groups, self.sizes = groups, sizes
        self.cached: list[Block] = []
        self.keyed: dict[Key, list[Block]] = {}

    def take(self, count: int) -> tuple[list[Block], list[tuple[Key, bool]]]:
        """Return new blocks, and the longest key of each evicted one with whether no other block has it."""
        gone = []
        for _ in range(count):
            if self.empty > 0:
                self.empty -= 1
                continue
            block = self.cached.pop(0)
            found = [key for key in block.keys if self.sizes.is_found_by(self.groups[key[0]], key[1])]
            self.drop(block, block.keys)
            if found:
                gone.append(max(found, key=lambda key: key[1]))
        last = [not self.keyed.get(key) and key not in gone[i + 1 :] for i, key in enumerate(gone)]
        return [Block() for _ in range(count)], list(zip(gone, last, strict=True))

    def find(self, key: Key) -> Block | None:
        return next(iter(self.keyed.get(key, [])), None)

    def reference(self, block: Block) -> None:
        if block.refs == 0:
            self.cached.remove(block)
        block.refs += 1

    def release(self, blocks: list[Block]) -> None:
        for block in reversed(blocks):
            block.refs -= 1
            if block.refs > 0:
                continue
            if block.keys:
                self.cached.append(block)
            else:
                self.empty += 1

    def name(self, block: Block, key: Key) -> None:
        block.keys.append(key)
        self.keyed.setdefault(key, []).append(block)

    def drop(self, block: Block, keys: list[Key]) -> None:
        for key in list(keys):
            block.keys.remove(key)
            self.keyed[key].remove(block)

    def drop_shorter(self, block: Block, end: int) -> None:
        self.drop(block, [key for key in block.keys if key[1] < end])

    def move_keys(self, source: Block, to: Block) -> None:
        keys = list(source.keys)
        self.drop(source, keys)
        for key in keys:
            self.name(to, key)


class Lower:
    """A tier that evicts the least recently used key."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.order: list[Key] = []

    def store(self, keys: list[Key]) -> list[Key]:
        """Store those of `keys` that are missing, as many as fit; the last is the first to go. Return them."""
        stored = [key for key in keys if key not in self.order][: self.blocks]
        self.make_room(len(stored))
        self.order += reversed(stored)
        return stored

    def make_room(self, count: int) -> None:
        del self.order[: max(0, len(self.order) + count - self.blocks)]

    def use(self, keys: list[Key]) -> None:
        for key in keys:
            self.order.remove(key)
            self.order.append(key)

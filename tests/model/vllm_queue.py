"""vLLM's block pool to the letter: a queue of free blocks, and a map from each name to the blocks that have it.

Slow and plain, block by block: the engine's pool of runs must do the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Table:
    """Blocks of a request, the first `named` of which have names."""

    blocks: list[int] = field(default_factory=list)
    named: int = 0


class VllmQueue:
    """Names stand for a block's content and all before it. Callers ask only for what is there."""

    def __init__(self, num_blocks: int, *, append_unnamed: bool) -> None:
        self.append_unnamed = append_unnamed
        self.free = list(range(num_blocks))
        self.references = [0] * num_blocks
        self.names: list[int | None] = [None] * num_blocks
        self.phantoms: set[int] = set()
        self.index: dict[
            int, dict[int, None]
        ] = {}  # the blocks of a name, in the order of their registration
        self.changes: list[tuple[str, int, bool]] = []
        self.evictions = 0

    def find(self, names: Sequence[int]) -> list[int]:
        found: list[int] = []
        for name in names:
            if name not in self.index:
                break
            found.append(next(iter(self.index[name])))
        return found

    def unreferenced(self, blocks: Sequence[int]) -> int:
        return sum(self.references[block] == 0 for block in blocks)

    def touch(self, table: Table, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.references[block] == 0:
                self.free.remove(block)
            self.references[block] += 1
        table.blocks = list(blocks)
        table.named = len(blocks)

    def take(self, table: Table, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            if self.names[block] is not None:
                self.evictions += 1
                self.remove_name(block)
            self.references[block] = 1
        table.blocks += taken
        return taken

    def cache(self, table: Table, names: Sequence[int]) -> None:
        for position in range(table.named, len(names)):
            block, name = table.blocks[position], names[position]
            self.changes.append(("stored", block, name not in self.index))
            self.names[block] = name
            self.index.setdefault(name, {})[block] = None
        table.named = max(table.named, len(names))

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each, the last first. Those without a name become the front, as a group."""
        front: list[int] = []
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] > 0:
                continue
            if self.names[block] is None and not self.append_unnamed:
                front.append(block)
            else:
                self.free.append(block)
        self.free = front + self.free

    def trim(self, table: Table, blocks: int) -> None:
        self.release(table.blocks[blocks:])
        del table.blocks[blocks:]

    def withdraw(self, table: Table, named: int) -> None:
        """Take names back, from the last block to the first that another table has too."""
        while table.named > named and self.references[table.blocks[table.named - 1]] == 1:
            table.named -= 1
        for block in table.blocks[table.named :]:
            if self.names[block] is not None:
                self.remove_name(block)

    def mark_phantoms(self, table: Table, named: int) -> None:
        self.phantoms.update(table.blocks[named : table.named])

    def reset(self) -> None:
        cached = sorted(block for block in self.free if self.names[block] is not None)
        for block in cached:
            self.remove_name(block)
        rest = [block for block in self.free if block not in set(cached)]
        self.free = rest + cached if self.append_unnamed else cached + rest

    def remove_name(self, block: int) -> None:
        name = self.names[block]
        assert name is not None
        blocks = self.index[name]
        del blocks[block]
        if not blocks:
            del self.index[name]
        self.changes.append(("removed", block, not blocks))
        self.names[block] = None
        self.phantoms.discard(block)

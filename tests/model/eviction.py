"""Slow, obvious eviction orders: lists that are searched from end to end.

An order holds every unreferenced block of a pool. A block is cached (it has an identity) or empty (None).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from model.hashing import fragment_bits
from understudy.kv import EvictionPolicy
from understudy.tokens import lineage_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

Lineage = int
Freed = tuple[int, Lineage | None]  # block id, what it caches


class Order(ABC):
    """The order in which a pool hands out its unreferenced blocks."""

    @abstractmethod
    def insert(self, freed: list[Freed]) -> None:
        """These became unreferenced together, in this order."""

    @abstractmethod
    def remove(self, block: int) -> None:
        """Take one block out of the order."""

    @abstractmethod
    def touch(self, blocks: list[int]) -> None:
        """These cached blocks were used without being referenced."""

    @abstractmethod
    def order(self) -> list[int]:
        """Every block, the next to go first."""

    def head(self, count: int) -> list[int]:
        """The first so many of the order."""
        return self.order()[:count]

    def __len__(self) -> int:
        return len(self.order())


class Queue(Order):
    """One list; what is freed goes to its end."""

    def __init__(self) -> None:
        self.queue: list[Freed] = []

    def insert(self, freed: list[Freed]) -> None:
        self.queue.extend(freed)

    def __len__(self) -> int:
        return len(self.queue)

    def remove(self, block: int) -> None:
        self.queue = [entry for entry in self.queue if entry[0] != block]

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            entry = next(entry for entry in self.queue if entry[0] == block)
            self.remove(block)
            self.queue.append(entry)

    def order(self) -> list[int]:
        return [block for block, _ in self.queue]


class VllmAppend(Queue):
    """vLLM of old: one queue over empty and cached blocks alike."""


class Vllm(Queue):
    """vLLM: cached blocks at the end, empty ones to the front as a group that keeps its order."""

    def insert(self, freed: list[Freed]) -> None:
        empty = [entry for entry in freed if entry[1] is None]
        cached = [entry for entry in freed if entry[1] is not None]
        self.queue = empty + self.queue + cached


class LastFreedFirst(Queue):
    """A stack: for policies written in Python, unlike any native one."""

    def order(self) -> list[int]:
        return super().order()[::-1]


class Lru(Queue):
    """Empty blocks first, oldest first; then cached ones, least recently used first."""

    def order(self) -> list[int]:
        empty = [block for block, lineage in self.queue if lineage is None]
        cached = [block for block, lineage in self.queue if lineage is not None]
        return empty + cached


class Fifo(Lru):
    """As LRU, but only being released counts as use."""

    def touch(self, blocks: list[int]) -> None:
        pass


class MultiLru(Queue):
    """Empty blocks first; then four LRU lists, the least used first. The level is fixed when a block is freed."""

    def __init__(self, uses: Callable[[Lineage], int], thresholds: tuple[int, int, int] = (3, 8, 15)) -> None:
        super().__init__()
        self.uses = uses
        self.thresholds = thresholds
        self.level: dict[int, int] = {}

    def insert(self, freed: list[Freed]) -> None:
        super().insert(freed)
        for block, lineage in freed:
            self.level[block] = -1 if lineage is None else self.level_of(lineage)

    def level_of(self, lineage: Lineage) -> int:
        return sum(self.uses(lineage) >= threshold for threshold in self.thresholds)

    def touch(self, blocks: list[int]) -> None:
        super().touch(blocks)
        for block, lineage in self.queue:
            if block in blocks and lineage is not None:
                self.level[block] = self.level_of(lineage)

    def order(self) -> list[int]:
        return sorted(
            super().order(), key=lambda block: self.level[block]
        )  # stable: each level keeps its order


@dataclass
class Node:
    """A place in the tree of prefixes: real while it caches blocks, a ghost while it only has children."""

    blocks: list[int] = field(default_factory=list)
    tick: int = 0  # when it became real
    parent: tuple[int, int] | None = None


class LeafFirst(Order):
    """Empty blocks first; then leaf first: a cached block goes only when no cached block continues it.

    Blocks with the same position and hash fragment share a node and leave it first in, first out.
    """

    def __init__(self, *, fifo: bool = False) -> None:
        self.fifo = fifo
        self.empty: list[int] = []
        self.lineage: dict[int, Lineage] = {}
        self.nodes: dict[tuple[int, int], Node] = {}
        self.children: Counter[tuple[int, int]] = Counter()
        self.leaves: dict[tuple[int, int], int] = {}  # when it joined the leaves
        self.clock = 0

    def insert(self, freed: list[Freed]) -> None:
        for block, lineage in freed:
            if lineage is None:
                self.empty.append(block)
            else:
                self.lineage[block] = lineage
                self.insert_cached(block)

    def place(self, block: int) -> tuple[int, int]:
        _, position, current, _ = lineage_parts(self.lineage[block])
        return position, current % 2 ** fragment_bits(position + 1)

    def insert_cached(self, block: int) -> None:
        key = self.place(block)
        node = self.nodes.setdefault(key, Node())
        node.blocks.append(block)
        if len(node.blocks) == 1:
            node.tick = self.clock = self.clock + 1
            if key[0] > 0 and node.parent is None:
                node.parent = (key[0] - 1, lineage_parts(self.lineage[block])[3])
                self.nodes.setdefault(node.parent, Node())
                self.children[node.parent] += 1
                self.leaves.pop(node.parent, None)
        self.settle(key)

    def remove(self, block: int) -> None:
        if block in self.empty:
            self.empty.remove(block)
            return
        key = self.place(block)
        self.nodes[key].blocks.remove(block)
        del self.lineage[block]
        self.settle(key)

    def settle(self, key: tuple[int, int]) -> None:
        """Drop ghosts without children from that place upwards; the place where this ends may be a leaf now."""
        while not self.nodes[key].blocks and not self.children[key]:
            self.leaves.pop(key, None)
            parent = self.nodes.pop(key).parent
            if parent is None:
                return
            self.children[parent] -= 1
            key = parent
        if not self.children[key] and key not in self.leaves:
            self.leaves[key] = self.clock = self.clock + 1

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            lineage = self.lineage[block]
            self.remove(block)
            self.insert([(block, lineage)])

    def next_cached(self) -> int:
        def rank(key: tuple[int, int]) -> int:
            return self.leaves[key] if self.fifo else self.nodes[key].tick

        return self.nodes[min(self.leaves, key=rank)].blocks[0]

    def order(self) -> list[int]:
        return self.head(len(self))

    def head(self, count: int) -> list[int]:
        out = self.empty[:count]
        if len(out) == count:
            return out
        if len(out) + 1 == count and self.lineage:
            return [*out, self.next_cached()]
        rehearsal = copy.copy(self)
        rehearsal.lineage, rehearsal.leaves = dict(self.lineage), dict(self.leaves)
        rehearsal.children = Counter(self.children)
        rehearsal.nodes = {key: replace(node, blocks=[*node.blocks]) for key, node in self.nodes.items()}
        while rehearsal.lineage and len(out) < count:
            out.append(rehearsal.next_cached())
            rehearsal.remove(out[-1])
        return out

    def __len__(self) -> int:
        return len(self.empty) + len(self.lineage)


class AsPolicy(EvictionPolicy):
    """Plays an order as an eviction policy written in Python."""

    def __init__(self, order: Order) -> None:
        self.own = order

    def on_freed(self, blocks: npt.NDArray[np.int32], lineage_hashes: list[int | None]) -> None:
        self.own.insert(list(zip(blocks.tolist(), lineage_hashes, strict=True)))

    def on_taken(self, blocks: npt.NDArray[np.int32]) -> None:
        for block in blocks.tolist():
            self.own.remove(block)

    def select(self, count: int) -> list[int]:
        return self.own.order()[:count]


def order_named(name: str, uses: Callable[[Lineage], int]) -> Order:
    """The order of a policy by its name; `uses` tells how often a hash was used (for multi_lru)."""
    orders: dict[str, Callable[[], Order]] = {
        "lineage": LeafFirst,
        "lineage_fifo": lambda: LeafFirst(fifo=True),
        "lru": Lru,
        "multi_lru": lambda: MultiLru(uses),
        "fifo": Fifo,
        "vllm": Vllm,
        "vllm_append": VllmAppend,
        "python": LastFreedFirst,
    }
    return orders[name]()

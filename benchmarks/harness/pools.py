"""Two pools behind one set of calls: the block manager, and its peer in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from model.plain_pool import PlainPool
from understudy.kv import BlockManager
from understudy.tokens import Identities

if TYPE_CHECKING:
    import numpy.typing as npt

    from understudy.core_types import PolicyName
    from understudy.kv import MutableBlocks, RegisteredBlocks

    Hashes = npt.NDArray[np.uint64]

Sequence = TypeVar("Sequence")  # the hashes of one call, as the pool wants them


class Pool(Protocol[Sequence]):
    """Each step makes one call for each sequence and keeps what it got for the next step."""

    def build(self, hashes: Hashes) -> list[Sequence]:
        """A sequence from each row."""

    def empty(self, free_order: npt.NDArray[np.int64] | None) -> None:
        """Forget everything; then bring the free blocks into an order, if one is given."""

    def allocate(self, size: int, calls: int) -> None: ...
    def register(self, sequences: list[Sequence]) -> None: ...
    def match(self, sequences: list[Sequence]) -> None: ...
    def release(self) -> None: ...
    def held_blocks(self) -> int: ...
    def cached_blocks(self) -> int: ...


class NativePool:
    """The block manager, called from Python."""

    def __init__(self, num_blocks: int, policy: PolicyName) -> None:
        self.manager = BlockManager(num_blocks, policy=policy)
        self._mutable: list[MutableBlocks] = []
        self._held: list[RegisteredBlocks] = []

    def build(self, hashes: Hashes) -> list[Identities]:
        return [Identities.from_local_hashes(row) for row in hashes]

    def empty(self, free_order: npt.NDArray[np.int64] | None) -> None:
        self.manager.clear_inactive()
        if free_order is None:
            return
        # Blocks are freed in the order of the guard that lets go of them last.
        hashes = np.arange(1, len(free_order) + 1, dtype=np.uint64)
        with self.manager.allocate(len(hashes)).register(Identities.from_sequence_hashes(hashes)) as blocks:
            lineage = blocks.identities.lineage_hashes
            at = np.argsort(blocks.ids)[free_order]
            ordered, _ = self.manager.match_scattered(
                Identities.from_lineage_hashes([lineage[i] for i in at])
            )
        ordered.set_reset_on_release(True)
        ordered.release(tail_first=False)

    def allocate(self, size: int, calls: int) -> None:
        allocate = self.manager.allocate
        self._mutable = [allocate(size) for _ in range(calls)]

    def register(self, sequences: list[Identities]) -> None:
        self._held = [blocks.register(seq) for blocks, seq in zip(self._mutable, sequences, strict=True)]
        self._mutable = []

    def match(self, sequences: list[Identities]) -> None:
        match_prefix = self.manager.match_prefix
        self._held = [match_prefix(sequence) for sequence in sequences]

    def release(self) -> None:
        for blocks in self._held:
            blocks.release()
        self._held = []

    def held_blocks(self) -> int:
        return sum(map(len, self._held))

    def cached_blocks(self) -> int:
        return self.manager.metrics().inactive_blocks


class PlainPythonPool:
    """The peer."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._pool = PlainPool(num_blocks)
        self._taken: list[list[int]] = []
        self._held: list[list[int]] = []

    def build(self, hashes: Hashes) -> list[list[int]]:
        rows: list[list[int]] = hashes.tolist()
        return rows

    def empty(self, free_order: npt.NDArray[np.int64] | None) -> None:
        self._pool = PlainPool(self._num_blocks)
        if free_order is not None:
            self._pool.allocate(self._num_blocks)
            self._pool.release(free_order[::-1].tolist())  # the tail goes first

    def allocate(self, size: int, calls: int) -> None:
        allocate = self._pool.allocate
        self._taken = [allocate(size)[0] for _ in range(calls)]

    def register(self, sequences: list[list[int]]) -> None:
        register = self._pool.register
        self._held = [register(taken, seq) for taken, seq in zip(self._taken, sequences, strict=True)]
        self._taken = []

    def match(self, sequences: list[list[int]]) -> None:
        match = self._pool.match
        self._held = [match(sequence) for sequence in sequences]

    def release(self) -> None:
        release = self._pool.release
        for held in self._held:
            release(held)
        self._held = []

    def held_blocks(self) -> int:
        return sum(map(len, self._held))

    def cached_blocks(self) -> int:
        return self._pool.registered

"""A paged pool in plain Python, as small engines write it: a dict from hash to block id, a deque of free ids.

The peer of benchmarks/block_manager.py, so it is as fast as plain Python reasonably gets: batches, local names, flat
lists, no object per block.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from understudy.errors import CapacityExhausted

if TYPE_CHECKING:
    from collections.abc import Sequence


class PlainPool:
    """Blocks with reference counts and a prefix cache. A freed block keeps its hash until it is handed out again.

    One queue over empty and cached blocks alike, least recently freed first; registering a hash that is already here
    frees the newcomer and takes the block that has it. Callers pass only what is legal.
    """

    def __init__(self, num_blocks: int) -> None:
        self.available = num_blocks
        self._refs = [0] * num_blocks
        self._hashes: list[int | None] = [None] * num_blocks
        self._blocks: dict[int, int] = {}
        self._queue = deque(range(num_blocks))
        # Matching a free block would have to search the queue for it. Its entry stays there instead, and this many of
        # the oldest entries of a block do not count.
        self._stale = [0] * num_blocks

    @property
    def registered(self) -> int:
        """Blocks that can be matched, referenced or not."""
        return len(self._blocks)

    def allocate(self, count: int) -> tuple[list[int], list[int]]:
        """`count` blocks, and the hashes that were evicted for them. CapacityExhausted when fewer are available."""
        if count > self.available:
            raise CapacityExhausted(f"asked for {count} blocks but only {self.available} are available")
        self.available -= count
        refs, hashes, blocks, stale = self._refs, self._hashes, self._blocks, self._stale
        popleft = self._queue.popleft
        taken: list[int] = []
        evicted: list[int] = []
        while count:
            block = popleft()
            if stale[block]:
                stale[block] -= 1
                continue
            old = hashes[block]
            if old is not None:
                del blocks[old]
                hashes[block] = None
                evicted.append(old)
            refs[block] = 1
            taken.append(block)
            count -= 1
        return taken, evicted

    def register(self, taken: Sequence[int], block_hashes: Sequence[int]) -> list[int]:
        """Make allocated blocks matchable. The ids that now hold the hashes."""
        refs, hashes, stale = self._refs, self._hashes, self._stale
        setdefault = self._blocks.setdefault
        held: list[int] = []
        freed: list[int] = []
        for block, block_hash in zip(taken, block_hashes, strict=True):
            holder = setdefault(block_hash, block)
            if holder == block:
                hashes[block] = block_hash
            else:
                refs[block] = 0
                freed.append(block)
                if not refs[holder]:
                    stale[holder] += 1
                    self.available -= 1
                refs[holder] += 1
            held.append(holder)
        self._queue.extend(freed)
        self.available += len(freed)
        return held

    def match(self, block_hashes: Sequence[int]) -> list[int]:
        """References to the longest run of leading hits."""
        refs, stale = self._refs, self._stale
        find = self._blocks.get
        held: list[int] = []
        revived = 0
        for block_hash in block_hashes:
            block = find(block_hash)
            if block is None:
                break
            count = refs[block]
            if not count:
                stale[block] += 1
                revived += 1
            refs[block] = count + 1
            held.append(block)
        self.available -= revived
        return held

    def release(self, held: Sequence[int]) -> None:
        """Drop a reference to each, from the last to the first, so that a tail is evicted before its head."""
        refs = self._refs
        freed: list[int] = []
        for block in reversed(held):
            count = refs[block] - 1
            refs[block] = count
            if not count:
                freed.append(block)
        self._queue.extend(freed)
        self.available += len(freed)
        if len(self._queue) > 2 * len(refs):
            self._compact()

    def _compact(self) -> None:
        stale = self._stale
        fresh: deque[int] = deque()
        for block in self._queue:
            if stale[block]:
                stale[block] -= 1
            else:
                fresh.append(block)
        self._queue = fresh

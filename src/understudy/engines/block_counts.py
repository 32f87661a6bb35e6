"""`BlockCounts`: the blocks of one tier of an engine by their use."""

from __future__ import annotations

from typing import NamedTuple


class BlockCounts(NamedTuple):
    """Number of blocks on one tier."""

    free: int
    active: int
    """Blocks that requests hold."""
    cached: int
    """Blocks that no request holds, and that an allocation may evict."""

    @property
    def usage(self) -> float:
        """Share of the tier's blocks that are in use, 0 … 1; 0 for a tier without blocks."""
        return (self.active + self.cached) / total if (total := sum(self)) else 0.0

    def plus(self, other: BlockCounts) -> BlockCounts:
        """Return the sums of these counts and others."""
        return BlockCounts(*(one + two for one, two in zip(self, other, strict=True)))

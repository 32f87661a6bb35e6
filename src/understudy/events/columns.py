"""Events of one publisher as columns, passed between a reader, a file and an index without one object per block."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from understudy._core import EventBatch
from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.events.events import Stream

ALL_TIERS = 0  # the tier of a cleared event

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


class EventKind(IntEnum):
    """Kind of a KV event, as in the column `kinds`."""

    STORED = 0
    REMOVED = 1
    CLEARED = 2
    SKIPPED = 3
    """Tokens of a Stored without a key, in the rows of an engine with several cache groups; never in columns."""


class EventColumns(msgspec.Struct, frozen=True, eq=False):
    """Ordered events of one publisher (a worker's DP rank): one row per event, blocks located by `offsets`.

    Event `i` is `kinds[i]` (an `EventKind`) on tier `tiers[i]` (1 to 4; 0, all of them, when cleared)
    and covers blocks `offsets[i]` to `offsets[i + 1]` of `sequence_hashes` and `local_hashes`. In a Stored, each block
    is the parent of the next, and `parents[i]` is the parent of the first (0: none, or unknown). `local_hashes` is 0
    where unknown and in every Removed. A Cleared has no blocks: the publisher's cache is empty. Arrays are contiguous;
    `check` verifies all of this.
    """

    kinds: U8
    tiers: U8
    parents: U64
    offsets: I64
    sequence_hashes: U64
    local_hashes: U64

    @classmethod
    def empty(cls) -> EventColumns:
        """Return columns without events."""
        none, hashes = np.zeros(0, np.uint8), np.zeros(0, np.uint64)
        return cls(none, none, hashes, np.zeros(1, np.int64), hashes, hashes)

    @classmethod
    def from_batch(cls, batch: EventBatch, stream: Stream) -> EventColumns:
        """Convert a store's drained rows; equal to the events of `decode`, without creating event objects."""
        return cls(*batch.event_columns(stream == "raw"))

    def to_batch(self) -> EventBatch:
        """Return the same events as rows of the consolidated stream, as a router receives them."""
        return EventBatch.from_columns(
            self.kinds, self.tiers, self.parents, self.offsets, self.sequence_hashes, self.local_hashes
        )

    @classmethod
    def concatenate(cls, parts: Sequence[EventColumns]) -> EventColumns:
        """Concatenate the events of `parts` in order."""
        if not parts:
            return cls.empty()
        if len(parts) == 1:
            return parts[0]
        sizes = np.cumsum([0, *(part.num_blocks for part in parts)])
        shifted = [part.offsets[1:] + size for part, size in zip(parts, sizes[:-1].tolist(), strict=True)]

        def joined(name: str) -> Any:
            return np.concatenate([getattr(part, name) for part in parts])

        return cls(
            joined("kinds"),
            joined("tiers"),
            joined("parents"),
            np.concatenate([np.zeros(1, np.int64), *shifted]),
            joined("sequence_hashes"),
            joined("local_hashes"),
        )

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def num_blocks(self) -> int:
        """Number of blocks over all events."""
        return len(self.sequence_hashes)

    def slice(self, start: int, stop: int) -> EventColumns:
        """Return events `start` to `stop`, sharing memory where possible."""
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return EventColumns(
            self.kinds[start:stop],
            self.tiers[start:stop],
            self.parents[start:stop],
            self.offsets[start : stop + 1] - first,
            self.sequence_hashes[first:last],
            self.local_hashes[first:last],
        )

    def check(self) -> None:
        """Raise InvalidArgument that names the first column that contradicts the others."""
        events, blocks = len(self.kinds), len(self.sequence_hashes)
        for name, kind, length in (
            ("kinds", np.uint8, events),
            ("tiers", np.uint8, events),
            ("parents", np.uint64, events),
            ("offsets", np.int64, events + 1),
            ("sequence_hashes", np.uint64, blocks),
            ("local_hashes", np.uint64, blocks),
        ):
            column = getattr(self, name)
            if not isinstance(column, np.ndarray) or column.dtype != kind or column.shape != (length,):
                raise InvalidArgument(f"{name} must be {length} values of {np.dtype(kind)}")
        if self.offsets[0] != 0 or self.offsets[-1] != blocks or (np.diff(self.offsets) < 0).any():
            raise InvalidArgument(f"offsets must rise from 0 to {blocks}, the number of blocks")
        if (self.kinds > EventKind.CLEARED).any():
            raise InvalidArgument("kinds must be 0 (stored), 1 (removed) or 2 (cleared)")
        cleared = self.kinds == EventKind.CLEARED
        if ((self.tiers < 1) | (self.tiers > 4))[~cleared].any():
            raise InvalidArgument("tiers must be from 1 to 4; 0 is only for cleared events")
        if np.diff(self.offsets)[cleared].any():
            raise InvalidArgument("offsets: a cleared event has blocks; it must have none")


def build_cleared() -> EventColumns:
    """Build one Cleared event, which invalidates all known blocks of the publisher."""
    none = np.zeros(0, np.uint64)
    return EventColumns(
        np.array([EventKind.CLEARED], np.uint8),
        np.array([ALL_TIERS], np.uint8),
        np.zeros(1, np.uint64),
        np.zeros(2, np.int64),
        none,
        none,
    )

"""Convert a raw stream, which reports every copy of a block, to a consolidated one; measure their difference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy import _core
from understudy._core import RawDistance
from understudy.events.columns import EventColumns

if TYPE_CHECKING:
    from understudy.events.group_reader import GroupColumns

__all__ = ["Consolidator", "RawDistance"]

MAX_BLOCKS = 1 << 26


class Consolidator:
    """Convert a raw stream of one publisher to the consolidated stream.

    vLLM publishes every copy of a block that it computes twice, and every copy that it drops. Here a block is Stored
    with its first copy on a tier and Removed with its last. The stream must start at its beginning or at a Cleared.
    Blocks beyond `max_blocks` are dropped and counted.

    With `by_content`, blocks are named by the sequence hash of their local hashes, which a router can compute for a
    prompt, instead of the engine's own hash (vLLM's is an internal SHA-256). It needs token ids in the stream; blocks
    without them that are on no other tier, or with an unknown parent, are dropped and counted as `unnamed`. One caller
    at a time: a second thread gets WrongState.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, *, by_content: bool = False) -> None:
        self._copies = _core.Consolidator(max_blocks, by_content)

    def apply(self, events: EventColumns) -> EventColumns:
        """Return the consolidated changes of the next events. InvalidArgument when the columns are not valid."""
        out = self._copies.apply(
            events.kinds,
            events.tiers,
            events.parents,
            events.offsets,
            events.sequence_hashes,
            events.local_hashes,
        )
        return to_event_columns(out)

    @property
    def distance(self) -> RawDistance:
        """Difference so far between the consolidated blocks and a reader that applies every raw Removed."""
        return self._copies.distance

    def __len__(self) -> int:
        """Number of stored blocks; each hash counts once per tier."""
        return len(self._copies)


def to_event_columns(native: _core.WireColumns | GroupColumns) -> EventColumns:
    """Convert decoded event columns."""
    return EventColumns(
        native.kinds,
        native.tiers,
        native.parents,
        native.offsets,
        native.sequence_hashes,
        native.local_hashes,
    )

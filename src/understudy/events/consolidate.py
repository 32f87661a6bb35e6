"""From a raw stream, which tells of every copy of a block, to the truth; and how far the two are apart."""

from __future__ import annotations

from understudy import _core
from understudy._core import RawDistance
from understudy.events.columns import EventColumns

__all__ = ["Consolidator", "RawDistance"]

MAX_BLOCKS = 1 << 26


class Consolidator:
    """Makes any raw stream of one publisher the consolidated one.

    vLLM announces every copy of a block that it computes twice, and every copy that it drops. Here a block is Stored
    with its first copy on a tier and Removed with its last, whatever the stream repeats. It needs nothing but the
    stream, from its beginning or from a Cleared. Blocks beyond `max_blocks` are dropped and counted.

    With `by_content`, blocks are told under the sequence hash of their local hashes, instead of the engine's own,
    which nobody else can compute (vLLM's is a SHA-256 of its own making): the name under which a router looks for a
    prompt. It needs streams with token ids; a block without them, or behind one that is not known, is dropped and
    counted as `unnamed`. One caller at a time: a second thread gets WrongState.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS, *, by_content: bool = False) -> None:
        self._copies = _core.Consolidator(max_blocks, by_content)

    def apply(self, events: EventColumns) -> EventColumns:
        """What these events, which follow those before, change in truth. InvalidArgument if they are no columns."""
        out = self._copies.apply(
            events.kinds,
            events.tiers,
            events.parents,
            events.offsets,
            events.sequence_hashes,
            events.local_hashes,
        )
        return columns_of(out)

    @property
    def distance(self) -> RawDistance:
        """How far a reader that takes every Removed at its word is from the truth, so far."""
        return self._copies.distance

    def __len__(self) -> int:
        """Blocks that are there, a hash on a tier counting once."""
        return len(self._copies)


def columns_of(native: _core.WireColumns) -> EventColumns:
    """The events among what the core read."""
    return EventColumns(
        native.kinds,
        native.tiers,
        native.parents,
        native.offsets,
        native.sequence_hashes,
        native.local_hashes,
    )

"""What the engines of a run would have sent: its events as messages of a dialect, publisher by publisher."""

from __future__ import annotations

import heapq
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from understudy.events.translate import to_wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from understudy.events.dialects import Dialect
    from understudy.events.events import Removed, Stored
    from understudy.events.wire import WireEvent


def wire_batches(
    publishers: list[Iterable[tuple[int, Stored | Removed]]], dialect: Dialect, *, block_size: int
) -> Iterator[tuple[int, int, list[WireEvent]]]:
    """(time in ns, publisher, events) by time: what became visible together goes in one batch, as an engine sends it.

    What such an engine does not speak of is left out, and so is a batch that has nothing else.
    """
    streams = [_steps(index, events) for index, events in enumerate(publishers)]
    for time_ns, publisher, events in heapq.merge(*streams, key=itemgetter(0, 1)):
        spoken = (to_wire(event, dialect, block_size=block_size) for event in events)
        if told := [event for event in spoken if event is not None]:
            yield time_ns, publisher, told


def _steps(
    publisher: int, events: Iterable[tuple[int, Stored | Removed]]
) -> Iterator[tuple[int, int, list[Stored | Removed]]]:
    for time_ns, group in groupby(events, key=itemgetter(0)):
        yield time_ns, publisher, [event for _, event in group]

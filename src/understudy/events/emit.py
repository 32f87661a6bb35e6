"""Convert the events of a run to the batches that engines of a dialect would send."""

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


def merge_wire_batches(
    publishers: list[Iterable[tuple[int, Stored | Removed]]], dialect: Dialect, *, block_size: int
) -> Iterator[tuple[int, int, list[WireEvent]]]:
    """Yield (time in ns, publisher, events) by time; events of one publisher and time form one batch.

    Events that such an engine does not publish are left out, and so are batches without any other.
    """
    streams = [_group_by_time(index, events) for index, events in enumerate(publishers)]
    for time_ns, publisher, events in heapq.merge(*streams, key=itemgetter(0, 1)):
        converted = (to_wire(event, dialect, block_size=block_size) for event in events)
        if published := [event for event in converted if event is not None]:
            yield time_ns, publisher, published


def _group_by_time(
    publisher: int, events: Iterable[tuple[int, Stored | Removed]]
) -> Iterator[tuple[int, int, list[Stored | Removed]]]:
    for time_ns, group in groupby(events, key=itemgetter(0)):
        yield time_ns, publisher, [event for _, event in group]

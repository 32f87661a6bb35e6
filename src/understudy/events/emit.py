"""Convert the events of a run to the batches that engines of a dialect would send."""

from __future__ import annotations

import heapq
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from understudy.events.translate import to_wire
from understudy.events.wire import AllBlocksCleared

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from understudy.events.dialects import Dialect
    from understudy.events.events import Removed, Stored
    from understudy.events.wire import WireEvent


def merge_wire_batches(
    publishers: list[Iterable[tuple[int, Stored | Removed]]],
    dialect: Dialect,
    *,
    block_size: int,
    native_offload: bool = False,
) -> Iterator[tuple[int, int, list[WireEvent]]]:
    """Yield (time in ns, publisher, events) by time; events of one publisher and time form one batch.

    Events that such an engine does not publish are left out, and so are batches without any other. `native_offload`
    as in `to_wire`.
    """
    started: set[int] = set()
    streams = [_group_by_time(index, events) for index, events in enumerate(publishers)]
    for time_ns, publisher, events in heapq.merge(*streams, key=itemgetter(0, 1)):
        published = to_wire(events, dialect, block_size=block_size, native_offload=native_offload)
        if published and dialect.starts_cleared and publisher not in started:
            published.insert(0, AllBlocksCleared())
        if published:
            started.add(publisher)
            yield time_ns, publisher, published


def _group_by_time(
    publisher: int, events: Iterable[tuple[int, Stored | Removed]]
) -> Iterator[tuple[int, int, list[Stored | Removed]]]:
    for time_ns, group in groupby(events, key=itemgetter(0)):
        yield time_ns, publisher, [event for _, event in group]

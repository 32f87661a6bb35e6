"""KV events: what a worker says about its blocks, how it is said in every release, and how it travels.

A store writes one row per block that came or went; `decode` turns drained rows into events, `EventColumns` holds many
of them without an object a block, `dialect` knows the words of every release, and `Publisher` and `Subscriber` carry
them over ZMQ (imported from their modules, which need pyzmq loaded).
"""

from understudy._core import EventBatch
from understudy.events.columns import EventColumns
from understudy.events.consolidate import Consolidator, RawDistance
from understudy.events.decode import decode
from understudy.events.dialects import Dialect, dialect, known_dialects
from understudy.events.events import (
    Cleared,
    EventsLost,
    KvEvent,
    Removed,
    RemovedBlock,
    SpokenEvent,
    Stored,
    StoredBlock,
    Stream,
)

__all__ = [
    "Cleared",
    "Consolidator",
    "Dialect",
    "EventBatch",
    "EventColumns",
    "EventsLost",
    "KvEvent",
    "RawDistance",
    "Removed",
    "RemovedBlock",
    "SpokenEvent",
    "Stored",
    "StoredBlock",
    "Stream",
    "decode",
    "dialect",
    "known_dialects",
]

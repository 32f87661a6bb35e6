"""KV events: reports of stored and removed blocks, their wire formats by release, and their transports.

A store writes one row per stored or removed block. `decode` turns drained rows into events; `EventColumns` keeps many
events without one object per block; `dialect` describes the wire format of a release; `Publisher` and `Subscriber`
transport events over ZMQ (import them from their modules, which need pyzmq).
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
    PublishedEvent,
    Removed,
    RemovedBlock,
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
    "PublishedEvent",
    "RawDistance",
    "Removed",
    "RemovedBlock",
    "Stored",
    "StoredBlock",
    "Stream",
    "decode",
    "dialect",
    "known_dialects",
]

"""KV events: a store writes one row per block that came or went, and `decode` turns drained rows into events."""

from understudy._core import EventBatch
from understudy.events.columns import EventColumns
from understudy.events.decode import decode
from understudy.events.events import EventsLost, KvEvent, Removed, RemovedBlock, Stored, StoredBlock, Stream

__all__ = [
    "EventBatch",
    "EventColumns",
    "EventsLost",
    "KvEvent",
    "Removed",
    "RemovedBlock",
    "Stored",
    "StoredBlock",
    "Stream",
    "decode",
]

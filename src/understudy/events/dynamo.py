"""Events for Dynamo's in-process router: `RadixTree.apply_event(worker, encode_dynamo_event(event))`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.events.events import Cleared, Removed

if TYPE_CHECKING:
    from understudy.events.events import PublishedEvent

_encoder = msgspec.json.Encoder()


def encode_dynamo_event(event: PublishedEvent) -> bytes:
    """Encode one event as Dynamo's JSON. An unknown local hash becomes 0, which matches no block."""
    data: Any
    if isinstance(event, Cleared):
        data = "cleared"
    elif isinstance(event, Removed):
        data = {"removed": {"block_hashes": [block.sequence_hash for block in event.blocks]}}
    else:
        blocks = [
            {"block_hash": block.sequence_hash, "tokens_hash": block.local_hash or 0}
            for block in event.blocks
        ]
        data = {"stored": {"parent_hash": event.parent_hash, "blocks": blocks}}
    return _encoder.encode({"event_id": event.event_id, "data": data, "dp_rank": event.dp_rank})

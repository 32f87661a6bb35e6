"""Schemas of KV events and of their messages."""

from __future__ import annotations

from typing import get_args

from schemas.shapes import (
    COUNT,
    INTEGER,
    NUMBER,
    TEXT,
    Schema,
    describe_object,
    describe_type,
    list_of,
)
from understudy.events.capture import CapturedMessage
from understudy.events.wire import WireEvent


def describe_event() -> Schema:
    """Describe a line of `replay --events` or `--raw-events`."""
    tier = {"tier": {"enum": ["G1", "G2", "G3", "G4"]}}
    maybe_hash = {"type": ["integer", "null"], "minimum": 0}
    removed_block = {"sequence_hash": COUNT, "position": INTEGER, "generation": COUNT}
    stored_block = {**removed_block, "local_hash": maybe_hash}
    stored = list_of(describe_object("stored block", stored_block, {"token_ids": list_of(COUNT)}))
    removed = list_of(describe_object("removed block", removed_block))
    shapes: dict[str, Schema] = {
        "stored": {**tier, "parent_hash": maybe_hash, "blocks": stored},
        "removed": {**tier, "blocks": removed},
    }
    publishers = {"worker": COUNT}, {"publisher": TEXT}  # a tier that workers share publishes for itself
    return {
        "title": "KV event",
        "oneOf": [
            describe_object(
                name, {"time_ns": INTEGER, **publisher, "event_id": COUNT, "type": {"const": name}, **keys}
            )
            for name, keys in shapes.items()
            for publisher in publishers
        ],
    }


def describe_kv_trace() -> Schema:
    """Describe a line of `replay --kv-trace`."""
    counts = ("blocks", "block_size", "free_blocks", "active_blocks", "inactive_blocks", "total_blocks")
    event = {"event": {"enum": ["allocation", "eviction"]}}
    where = {"time_ns": INTEGER, "worker": COUNT}
    return describe_object(
        "KV trace line", {**where, **event, **dict.fromkeys(counts, COUNT), "utilization": NUMBER}
    )


def describe_message() -> Schema:
    """Describe a line of `events emit --out` or `events tap --record`."""
    hexadecimal = {"type": "string", "pattern": "^([0-9a-f]{2})*$"}
    keys = {"topic": hexadecimal, "sequence": COUNT, "payload": hexadecimal, "publisher": TEXT}
    assert tuple(keys) == CapturedMessage.__struct_fields__
    return describe_object("captured message", keys)


def describe_wire_event() -> Schema:
    """Describe a line of `events tap --json`: an event as it was sent, without fields that have their default."""
    defs: Schema = {}
    head = {"sequence": COUNT, "ts": NUMBER, "rank": {"type": ["integer", "null"]}}
    shapes = []
    for kind in get_args(WireEvent):
        described = describe_type(kind, defs)
        properties = defs.pop(described["$ref"].rpartition("/")[2])["properties"]
        required = [name for name in ("type", "block_hashes") if name in properties]
        first = {name: properties.pop(name) for name in required}
        shapes.append(describe_object(kind.__name__, {**head, **first}, properties))
    return {"title": "KV event as it was sent", "oneOf": shapes}

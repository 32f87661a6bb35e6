"""KV events as engines send them: their fields, and the bytes of every dialect.

Nothing is interpreted here: decoded events can be encoded again byte for byte. `translate` interprets them.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from understudy.errors import InvalidArgument, MalformedBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.events.dialects import Dialect

Hash: TypeAlias = int | bytes  # unsigned, negative (int64) or a digest

MAX_PAYLOAD_BYTES = 64 << 20  # per batch; a longer one is refused unread


class BlockStored(msgspec.Struct, tag="BlockStored", tag_field="type", omit_defaults=True, gc=False):
    """Blocks were stored, each the child of the one before it; fields of all dialects, as on the wire."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: list[int] = msgspec.field(default_factory=list)
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", tag_field="type", omit_defaults=True, gc=False):
    """Blocks were removed."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type"):
    """The publisher removed all blocks."""


WireEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class BadEvent(msgspec.Struct, frozen=True):
    """An unreadable event of a batch whose other events were read."""

    index: int
    reason: str
    bytes: bytes


class WireBatch(msgspec.Struct):
    """Content of one message. `rank` is None where the dialect has none or the publisher did not set it."""

    ts: float
    events: list[WireEvent]
    rank: int | None = None
    bad: list[BadEvent] = msgspec.field(default_factory=list)


# --- writing ------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()


def encode_event(event: WireEvent, dialect: Dialect) -> bytes:
    """Encode an event in a dialect. InvalidArgument when it has a field that the dialect does not have."""
    return _encoder.encode(_plain(event, dialect))


def encode_batch(batch: WireBatch, dialect: Dialect) -> bytes:
    """Encode the payload of a message, without unreadable events. InvalidArgument as in `encode_event`."""
    events = [_plain(event, dialect) for event in batch.events]
    return _encoder.encode([batch.ts, events, batch.rank] if dialect.has_rank else [batch.ts, events])


def _plain(event: WireEvent, dialect: Dialect) -> list[Any] | dict[str, Any]:
    tag = type(event).__name__
    if isinstance(event, AllBlocksCleared):
        return [tag] if dialect.array_events else {"type": tag}
    stored = isinstance(event, BlockStored)
    fields = dialect.stored_fields if stored else dialect.removed_fields
    for name in _list_missing_fields(type(event), fields):
        if getattr(event, name) is not None and not (name == "cache_salt" and dialect.salt_element):
            raise InvalidArgument(f"{dialect.name} has no {name} in a {tag}; leave it out")
    if not dialect.array_events:
        always = dialect.always
        encoded: dict[str, Any] = {"type": tag}
        for name in fields:
            value = getattr(event, name)
            if value is not None or name in always:
                encoded[name] = value
        return encoded
    elements = [tag, *(getattr(event, name) for name in fields)]
    if dialect.salt_element and isinstance(event, BlockStored) and event.cache_salt is not None:
        elements.append({"cache_salt": event.cache_salt})
    return elements


@cache
def _list_missing_fields(kind: type[BlockStored | BlockRemoved], fields: tuple[str, ...]) -> tuple[str, ...]:
    """List the fields of an event that a dialect does not have."""
    return tuple(name for name in kind.__struct_fields__ if name not in fields)


# --- reading ------------------------------------------------------------------------------------------


class _ArrayStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """Elements of vLLM's array. SGLang's array is a prefix of it, with a map with a salt in place of `lora_name`."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | dict[str, Any] | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _ArrayRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class _ArrayCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _MapStored(BlockStored, tag="BlockStored", tag_field="type", kw_only=True):
    """A map event; fields that every producer writes are required, so an incomplete event is an error."""

    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int


_FIELDS = BlockStored.__struct_fields__
_ARRAY_FIELDS = _ArrayStored.__struct_fields__
_batch_decoder = msgspec.msgpack.Decoder(tuple[msgspec.Raw, ...])
_events_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ts_decoder = msgspec.msgpack.Decoder(float)
_rank_decoder = msgspec.msgpack.Decoder(int | None)
_array_decoder = msgspec.msgpack.Decoder(_ArrayStored | _ArrayRemoved | _ArrayCleared)
_map_decoder = msgspec.msgpack.Decoder(_MapStored | BlockRemoved | AllBlocksCleared)

# Errors of msgspec on invalid bytes; the last two for deep nesting and for invalid UTF-8.
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


def decode_event(data: bytes | memoryview | msgspec.Raw) -> WireEvent:
    """Decode an event of any dialect. MalformedBatch when it is not one."""
    view = memoryview(data)
    try:
        if len(view) and _is_map(view[0]):
            event = _map_decoder.decode(view)
            return _from_map(event) if isinstance(event, _MapStored) else event
        return _from_array(_array_decoder.decode(view))
    except _DECODE_ERRORS as error:
        raise MalformedBatch(f"not a KV event: {error}") from error


def decode_batch(payload: bytes | memoryview) -> WireBatch:
    """Decode a message's payload of any dialect. Unreadable events go to `bad`; the others are read.

    MalformedBatch when the payload is not an array of a time, events and optionally a rank, or is longer than
    `MAX_PAYLOAD_BYTES`.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MalformedBatch(f"a batch of {len(payload)} bytes exceeds the maximum of {MAX_PAYLOAD_BYTES}")
    try:
        parts = _batch_decoder.decode(payload)
        if len(parts) < 2:
            raise MalformedBatch(f"a batch has a time and events; this one has {len(parts)} elements")
        batch = WireBatch(_ts_decoder.decode(parts[0]), [])
        encoded = _events_decoder.decode(parts[1])
        if len(parts) > 2:
            batch.rank = _rank_decoder.decode(parts[2])
    except _DECODE_ERRORS as error:
        raise MalformedBatch(f"not a batch of KV events: {error}") from error
    for index, data in enumerate(encoded):
        try:
            batch.events.append(decode_event(data))
        except MalformedBatch as error:
            batch.bad.append(BadEvent(index, str(error), bytes(data)))
    return batch


def _is_map(first: int) -> bool:
    return first & 0xF0 == 0x80 or first in (0xDE, 0xDF)


def _from_map(event: _MapStored) -> BlockStored:
    return BlockStored(*[getattr(event, name) for name in _FIELDS])


def _from_array(event: _ArrayStored | _ArrayRemoved | _ArrayCleared) -> WireEvent:
    if isinstance(event, _ArrayCleared):
        return AllBlocksCleared()
    if isinstance(event, _ArrayRemoved):
        return BlockRemoved(event.block_hashes, event.medium, event.group_idx)
    stored = BlockStored(*[getattr(event, name) for name in _ARRAY_FIELDS])
    if isinstance(event.lora_name, dict):
        salt = event.lora_name.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise MalformedBatch(f"not a KV event: cache_salt must be text, got {type(salt).__name__}")
        stored.lora_name, stored.cache_salt = None, salt
    return stored


def sequence_bytes(sequence: int) -> bytes:
    """Encode a sequence number as a frame; -1 is the end of a replay."""
    return sequence.to_bytes(8, "big", signed=sequence < 0)


def parse_sequence(frame: bytes) -> int:
    """Parse the sequence number in a frame; -1 is the end of a replay. MalformedBatch unless it has 8 bytes."""
    if len(frame) != 8:
        raise MalformedBatch(f"a sequence number has 8 bytes, this frame has {len(frame)}")
    return -1 if frame == b"\xff" * 8 else int.from_bytes(frame, "big")


def live_frames(topic: bytes, sequence: int, payload: bytes) -> list[bytes]:
    """Build the frames that a subscriber receives."""
    return [topic, sequence_bytes(sequence), payload]


def replay_frames(dialect: Dialect, topic: bytes, sequence: int, payload: bytes) -> list[bytes]:
    """Build a replay answer's frames after the reader's identity; `sequence` -1 and an empty payload end it."""
    if not dialect.replay_topic:
        return [b"", sequence_bytes(sequence), payload]
    return [b"", b"" if sequence < 0 else topic, sequence_bytes(sequence), payload]


def parse_frames(frames: Sequence[bytes]) -> tuple[bytes, int, bytes]:
    """Parse (topic, sequence, payload) of a live message, or of a replay answer after the identity, in either framing.

    MalformedBatch when the frames are neither.
    """
    if len(frames) == 4 and frames[0] == b"":
        frames = frames[1:]
    if len(frames) != 3:
        raise MalformedBatch(
            f"a message has a topic, a sequence number and a payload; this one has {len(frames)} frames"
        )
    return frames[0], parse_sequence(frames[1]), frames[2]

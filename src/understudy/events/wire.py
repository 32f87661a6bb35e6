"""KV events as engines send them: their fields, and the bytes of every dialect.

Nothing is interpreted here: decoded events can be encoded again byte for byte. `translate` interprets them.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from understudy.errors import InvalidArgument, MalformedBatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    lookahead_token_ids: list[list[int]] | None = None


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
    return _encoder.encode(_converters(dialect)[type(event)](event))


def encode_batch(batch: WireBatch, dialect: Dialect) -> bytes:
    """Encode the payload of a message, without unreadable events. InvalidArgument as in `encode_event`."""
    convert = _converters(dialect)
    events = [convert[type(event)](event) for event in batch.events]
    return _encoder.encode([batch.ts, events, batch.rank] if dialect.has_rank else [batch.ts, events])


class _Layout:
    """Convert events of one kind to a struct as the release declares it, so that msgspec writes equal bytes.

    A map with more than 15 declared fields has a 16-bit length, even when fewer are written.
    """

    def __init__(self, kind: type[WireEvent], fields: tuple[str, ...], dialect: Dialect) -> None:
        self._dialect = dialect
        self._missing = tuple(name for name in kind.__struct_fields__ if name not in fields)
        self._read, self._read_missing = _reader(fields), _reader(self._missing)
        self._nothing = (None,) * len(self._missing)
        self._struct = msgspec.defstruct(
            kind.__name__,
            [name if name in dialect.always else (name, Any, None) for name in fields],
            tag=kind.__name__,
            tag_field=None if dialect.array_events else "type",
            array_like=dialect.array_events,
            omit_defaults=not dialect.array_events,
            gc=False,
        )

    def convert(self, event: WireEvent) -> object:
        """Return the release's struct. InvalidArgument as in `encode_event`."""
        converted = self._struct(*self._read(event))
        if self._read_missing(event) == self._nothing:
            return converted
        for name, value in zip(self._missing, self._read_missing(event), strict=True):
            if value is not None and not (name == "cache_salt" and self._dialect.salt_element):
                raise InvalidArgument(
                    f"{self._dialect.name} has no {name} in a {type(event).__name__}; leave it out"
                )
        salt = {"cache_salt": getattr(event, "cache_salt", None)}
        return [type(event).__name__, *msgspec.structs.astuple(converted), salt]


def _reader(names: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    """Return a function that reads these attributes."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda event: tuple(getattr(event, name) for name in names)


_Converters: TypeAlias = "dict[type[WireEvent], Callable[[Any], object]]"
_known_converters: dict[str, _Converters] = {}  # by name of the dialect


def _converters(dialect: Dialect) -> _Converters:
    """Return the functions that convert events of each kind to structs of a dialect."""
    found = _known_converters.get(dialect.name)
    if found is None:
        removed = _Layout(BlockRemoved, dialect.removed_fields, dialect).convert
        found = _known_converters[dialect.name] = {
            BlockStored: _Layout(BlockStored, dialect.stored_fields, dialect).convert,
            BlockRemoved: removed if dialect.array_events else _pass_usual(removed, dialect),
            AllBlocksCleared: _Layout(AllBlocksCleared, (), dialect).convert,
        }
    return found


def _pass_usual(convert: Callable[[Any], object], dialect: Dialect) -> Callable[[Any], object]:
    """Convert only the removals whose bytes are not those of `BlockRemoved` itself: most events are removals."""
    grouped = "group_idx" in dialect.removed_fields

    def convert_removed(event: BlockRemoved) -> object:
        usual = event.medium is not None and event.locality is None and event.ownership is None
        return event if usual and (grouped or event.group_idx is None) else convert(event)

    return convert_removed


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

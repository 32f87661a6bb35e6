"""Verify that a stream follows the rules of its kind; report each violation with its message and event.

Rules of every stream: sequence numbers have no gap; batches and events can be read; an event names a block once and
never as its own parent; a block's parent is stored before it (on the device); a hash keeps its parent and its tokens;
only stored blocks are removed from a tier; token ids fit the blocks; block size, rank and topic stay equal, and time
does not decrease. With a dialect: its format, its fields, its tier names. A **raw** stream reports every copy: as many
are removed as were stored. A **consolidated** stream stores only blocks that are not stored.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from understudy._core import Tier
from understudy.errors import MalformedBatch
from understudy.events.events import Cleared, Removed, Stored
from understudy.events.translate import from_wire
from understudy.events.wire import AllBlocksCleared, BlockStored, decode_batch, encode_event, parse_frames

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.events.dialects import Dialect
    from understudy.events.events import PublishedEvent, Stream
    from understudy.events.wire import WireBatch, WireEvent

_Place: TypeAlias = tuple[Tier, int]  # tier and cache group

# Rules by name, with a description of their violation.
RULES: dict[str, str] = {
    "frames": "a message is not a topic, a sequence number and a payload",
    "topic": "the topic changed",
    "gap": "messages are missing",
    "order": "a sequence number was repeated or decreased",
    "batch": "a payload is not a batch",
    "event": "an event cannot be read, or contradicts itself",
    "dialect": "the named release would write it differently",
    "empty": "an event names no blocks",
    "rank": "the rank changed, or is not the requested one",
    "time": "a timestamp is not a time, or decreased",
    "block_size": "the block size changed, or is not positive",
    "tokens": "token ids do not fit the blocks",
    "parent": "a block was stored on the device before its parent",
    "identity": "a hash was stored again with another parent or other tokens",
    "stored_twice": "a consolidated stream stored a block twice",
    "unknown": "a block was removed that was not stored",
    "tier": "a block was removed from a tier that it was not on, while it was on another",
}


class Violation(msgspec.Struct, frozen=True):
    """A violated rule; `event` is the index within the message."""

    rule: str
    message: int  # counted from 0 in order of receipt, independent of sequence numbers
    sequence: int | None
    event: int | None
    text: str

    def __str__(self) -> str:
        where = f"message {self.message}" + (
            f" (sequence {self.sequence})" if self.sequence is not None else ""
        )
        return f"{where}{'' if self.event is None else f', event {self.event}'}: {self.rule}: {self.text}"


class Verifier:
    """Check one publisher's stream against the rules; pass every message in order to `check_message`.

    `stream` is the kind that it claims to be. A stream that starts in the middle (`from_start` false) may name blocks
    stored before: unknown blocks are then no violation.
    """

    def __init__(
        self,
        stream: Stream,
        *,
        dialect: Dialect | None = None,
        rank: int | None = None,
        from_start: bool = True,
    ) -> None:
        self.stream = stream
        self.dialect = dialect
        self.messages = self.events = self.blocks = 0
        self._rank = rank
        self._is_complete = from_start
        self._topic: bytes | None = None
        self._sequence: int | None = None
        self._time = -math.inf
        self._block_size: int | None = None
        self._live: dict[_Place, dict[int, int]] = {}  # copies by hash
        self._known: dict[int, tuple[int | None, int | None]] = {}  # parent and local hash of live blocks
        self._found: list[Violation] = []

    def check_message(self, frames: Sequence[bytes]) -> list[Violation]:
        """Check the next message and return its violations."""
        self._found = []
        try:
            topic, sequence, payload = parse_frames(frames)
            if len(frames) != 3 or sequence < 0:
                raise MalformedBatch("not a live message but an answer of a replay socket")
        except MalformedBatch as error:
            self._report("frames", str(error))
        else:
            self._check_envelope(topic, sequence, payload)
        self.messages += 1
        return self._found

    # --- a message ------------------------------------------------------------------------------------

    def _check_envelope(self, topic: bytes, sequence: int, payload: bytes) -> None:
        last, self._now = self._sequence, sequence
        self._sequence = sequence
        if self._topic is not None and topic != self._topic:
            self._report("topic", f"{topic!r}, before {self._topic!r}")
        self._topic = topic
        expected = 0 if last is None and self._is_complete else None if last is None else last + 1
        if expected is not None and sequence > expected:
            self._report("gap", f"{sequence - expected} messages before it are missing")
            self._is_complete = False
        elif expected is not None and sequence < expected:
            self._report("order", f"message {expected} was expected")
        try:
            batch = decode_batch(payload)
        except MalformedBatch as error:
            self._report("batch", str(error))
            self._is_complete = False
            return
        self._check_batch(batch)
        for bad in batch.bad:
            self._report("event", bad.reason, bad.index)
        bad_indices = {bad.index for bad in batch.bad}
        places = (index for index in range(len(batch.events) + len(bad_indices)) if index not in bad_indices)
        raw = _raw_events(payload)
        for index, event in zip(places, batch.events, strict=True):
            self._check_event(index, event, raw[index])

    def _check_batch(self, batch: WireBatch) -> None:
        if not math.isfinite(batch.ts) or batch.ts < 0:
            self._report("time", f"{batch.ts} is not a time")
        elif batch.ts < self._time:
            self._report("time", f"{self._time - batch.ts:.6f} s before the previous message")
        else:
            self._time = batch.ts
        if self._rank is None:
            self._rank = batch.rank
        elif batch.rank != self._rank:
            self._report("rank", f"{batch.rank}, expected {self._rank}")

    # --- an event -------------------------------------------------------------------------------------

    def _check_event(self, index: int, event: WireEvent, data: bytes) -> None:
        self.events += 1
        if self.dialect is not None:
            self._check_dialect(index, event, data)
        try:
            meant = from_wire(event)
        except MalformedBatch as error:
            self._report("event", str(error), index)
            return
        if isinstance(meant, Cleared):
            self._live.clear()
            self._known.clear()
            self._is_complete = True  # all stored blocks are known
            return
        self.blocks += len(meant.blocks)
        if not meant.blocks:
            self._report("empty", f"a {type(event).__name__} without blocks", index)
        if isinstance(meant, Removed):
            self._check_removed(index, meant)
        elif isinstance(event, BlockStored):
            described = meant.tier == Tier.G1 or bool(event.block_size or event.token_ids)
            if described:
                self._check_tokens(index, event)
            self._check_stored(index, meant, described=described)

    def _check_dialect(self, index: int, event: WireEvent, data: bytes) -> None:
        assert self.dialect is not None
        try:
            same = encode_event(event, self.dialect) == data
        except ValueError as error:
            self._report("dialect", str(error), index)
            return
        if not same:
            form = "an array" if self.dialect.array_events else "a map"
            self._report("dialect", f"{self.dialect.name} would write {form} of other bytes", index)
        medium = None if isinstance(event, AllBlocksCleared) else event.medium
        if medium is not None and medium not in self.dialect.media.values():
            self._report("dialect", f"{self.dialect.name} has no medium {medium!r}", index)

    def _check_tokens(self, index: int, event: BlockStored) -> None:
        if event.block_size < 1:
            self._report("block_size", f"{event.block_size} is not positive", index)
        elif self._block_size not in (None, event.block_size) and not event.group_idx:
            self._report("block_size", f"{event.block_size}, before {self._block_size}", index)
        elif not event.group_idx:
            self._block_size = event.block_size
        expected = event.block_size * len(event.block_hashes)
        whole_prompt = not event.group_idx and event.kv_cache_spec_sliding_window is None
        if event.token_ids and whole_prompt and len(event.token_ids) != expected:
            self._report("tokens", f"{len(event.token_ids)} ids for {expected} tokens of blocks", index)

    def _check_stored(self, index: int, event: Stored, *, described: bool) -> None:
        """Check a store; one that is not `described` (vLLM's native offload) has neither parents nor tokens."""
        here = self._live.setdefault((event.tier, event.group), {})
        parent = event.parent_hash
        if event.tier == Tier.G1 and self._is_complete and parent is not None and parent not in here:
            self._report(
                "parent", f"block {event.blocks[0].sequence_hash} is stored before its parent {parent}", index
            )
        for block in event.blocks:
            value = block.sequence_hash
            if self.stream == "consolidated" and value in here:
                self._report("stored_twice", f"block {value} is on {event.tier.name} already", index)
            here[value] = here.get(value, 0) + 1
            if not described:
                continue
            before = self._known.get(value)
            if before is not None and not event.group and _differs(before, (parent, block.local_hash)):
                self._report(
                    "identity", f"block {value} was stored before with another parent or other tokens", index
                )
            else:
                self._known[value] = (parent, block.local_hash)
            parent = value

    def _check_removed(self, index: int, event: Removed) -> None:
        here = self._live.setdefault((event.tier, event.group), {})
        for block in event.blocks:
            value = block.sequence_hash
            copies = here.get(value, 0)
            if copies > 1 and self.stream == "raw":
                here[value] = copies - 1
            elif copies:
                del here[value]
                if not any(value in blocks for blocks in self._live.values()):
                    self._known.pop(value, None)
            elif others := [place for place, blocks in self._live.items() if value in blocks]:
                names = ", ".join(f"{tier.name} (group {group})" for tier, group in others)
                self._report("tier", f"block {value} is not on {event.tier.name}, but on {names}", index)
            elif self._is_complete:
                self._report("unknown", f"block {value} is not stored", index)

    def _report(self, rule: str, text: str, event: int | None = None) -> None:
        assert rule in RULES
        sequence = self._sequence if rule != "frames" else None
        self._found.append(Violation(rule, self.messages, sequence, event, text))


def _differs(before: tuple[int | None, int | None], now: tuple[int | None, int | None]) -> bool:
    """Return whether the fields that both have differ."""
    known_local = None not in (before[1], now[1])
    return before[0] != now[0] or (known_local and before[1] != now[1])


def _raw_events(payload: bytes) -> list[bytes]:
    """Return the bytes of each event of a decoded batch."""
    parts = msgspec.msgpack.decode(payload, type=tuple[msgspec.Raw, ...])
    return [bytes(data) for data in msgspec.msgpack.decode(parts[1], type=list[msgspec.Raw])]


def format_event(event: PublishedEvent) -> str:
    """Format an event as one readable line."""
    if isinstance(event, Cleared):
        return "cleared"
    hashes = [f"{block.sequence_hash:016x}" for block in event.blocks]
    shown = " ".join(hashes[:4]) + (f" … {len(hashes)} blocks" if len(hashes) > 4 else "")
    group = f" group {event.group}" if event.group else ""
    if isinstance(event, Removed):
        return f"removed {event.tier.name}{group}: {shown}"
    parent = "root" if event.parent_hash is None else f"{event.parent_hash:016x}"
    names = {"lora": event.lora, "salt": event.salt, "session": event.session}
    labels = "".join(f" {name} {value}" for name, value in names.items() if value is not None)
    return f"stored  {event.tier.name}{group}{labels}: {parent} → {shown}"

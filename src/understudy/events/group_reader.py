"""Read the messages of an engine with several KV cache groups into columns, with keys that a router can compute."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from understudy._core import Identities, TokenBlocks, WireColumns, read_wire
from understudy.errors import MalformedBatch
from understudy.events.columns import I64, U8, U64, EventKind
from understudy.events.events import FULL_ATTENTION, Cleared, Removed
from understudy.events.translate import from_wire
from understudy.events.wire import AllBlocksCleared, BlockStored, decode_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.events.events import Stored
    from understudy.events.wire import WireBatch, WireEvent

_GROUP_FACTOR = 0x9E3779B97F4A7C15  # as in the core (group_key)
_MASK = (1 << 64) - 1
LEARNABLE = {
    FULL_ATTENTION: "full",
    "mla_attention": "mla",
    "sliding_window": "sliding_window",
    "sliding_window_mla": "sliding_window_mla",
    "mamba": "mamba",
}
"""Kinds of groups whose lookup follows from their events, with their names in `KvCacheGroup`."""


class GroupLabel(msgspec.Struct, frozen=True):
    """A KV cache group as events describe it."""

    kind: str
    window: int | None
    block_size: int


class GroupColumns(msgspec.Struct, frozen=True, eq=False):
    """Events of messages, with the fields of `WireColumns`; `sequence_hashes` are keys of content and group."""

    kinds: U8
    tiers: U8
    parents: U64
    offsets: I64
    sequence_hashes: U64
    local_hashes: U64
    ts: npt.NDArray[np.float64]
    malformed: list[int]
    bad_events: int
    ignored_events: int


class _Rows:
    """Rows of the columns of one call."""

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.tiers: list[int] = []
        self.offsets = [0]
        self.keys: list[int] = []

    def add(self, kind: EventKind, tier: int, keys: Sequence[int]) -> None:
        """Add an event; one without blocks only if it clears."""
        if keys or kind == EventKind.CLEARED:
            self.keys += keys
            self.kinds.append(kind)
            self.tiers.append(tier)
            self.offsets.append(len(self.keys))


class GroupReader:
    """Name the blocks of all groups by content: `unit` tokens per hash, as the engine's groups have it.

    A stored event has all tokens of its range but names only the blocks with a key. Its i-th hash is therefore not
    always that of the i-th block: such a hash gets its name from another group that names all blocks of the range, or
    is equal to a computed one (our own engines). Until then it is pending. For one publisher and one thread.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._names: dict[int, int] = {}  # content by the engine's hash
        self._copies: dict[int, int] = {}  # stored blocks of that hash, over groups and tiers
        self._pending: dict[int, list[tuple[int, int]]] = {}  # group and tier of stored blocks without a name

    @property
    def unnamed(self) -> int:
        """Stored blocks whose content is not known."""
        return sum(map(len, self._pending.values()))

    def clear(self) -> None:
        """Forget all blocks."""
        self._names.clear()
        self._copies.clear()
        self._pending.clear()

    def read(self, payloads: Sequence[bytes]) -> GroupColumns:
        """Read messages in order. Unreadable ones and events of other owners are counted, as `read_wire` does."""
        rows, ts = _Rows(), []
        malformed: list[int] = []
        bad = ignored = 0
        for place, payload in enumerate(payloads):
            try:
                batch = decode_batch(payload)
            except MalformedBatch:
                malformed.append(place)
                ts.append(0.0)
                continue
            ts.append(batch.ts)
            bad += len(batch.bad)
            for event in batch.events:
                if _is_foreign(event):
                    ignored += 1
                    continue
                try:
                    self._apply(event, rows)
                except MalformedBatch:
                    bad += 1
        return GroupColumns(
            np.array(rows.kinds, np.uint8),
            np.array(rows.tiers, np.uint8),
            np.zeros(len(rows.kinds), np.uint64),
            np.array(rows.offsets, np.int64),
            np.array(rows.keys, np.uint64),
            np.zeros(len(rows.keys), np.uint64),
            np.array(ts, np.float64),
            malformed,
            bad,
            ignored,
        )

    def _apply(self, event: WireEvent, rows: _Rows) -> None:
        read = from_wire(event)
        if isinstance(read, Cleared):
            self.clear()
            rows.add(EventKind.CLEARED, 0, ())
        elif isinstance(read, Removed):
            keys = [self._remove(block.sequence_hash, read.group, read.tier) for block in read.blocks]
            rows.add(EventKind.REMOVED, read.tier, [key for key in keys if key is not None])
        else:
            assert isinstance(event, BlockStored)
            self._store(read, self._name_blocks(read, event), rows)

    def _store(self, stored: Stored, names: dict[int, int], rows: _Rows) -> None:
        for value, name in names.items():
            self._names[value] = name
            for group, tier in self._pending.pop(value, ()):
                self._count(value)
                rows.add(EventKind.STORED, tier, [_key(name, group)])
        keys = []
        for block in stored.blocks:
            value = block.sequence_hash
            known = self._names.get(value)
            if known is None:
                self._pending.setdefault(value, []).append((stored.group, stored.tier))
            else:
                self._count(value)
                keys.append(_key(known, stored.group))
        rows.add(EventKind.STORED, stored.tier, keys)

    def _count(self, value: int) -> None:
        self._copies[value] = self._copies.get(value, 0) + 1

    def _remove(self, value: int, group: int, tier: int) -> int | None:
        """Return the key of a removed block; None when it has none."""
        waiting = self._pending.get(value)
        if waiting is not None:
            if (group, tier) in waiting:
                waiting.remove((group, tier))
            if not waiting:
                del self._pending[value]
            return None
        name = self._names.get(value)
        if name is None:
            return None
        left = self._copies.get(value, 1) - 1
        self._copies[value] = left
        if left <= 0:
            del self._copies[value], self._names[value]
        return _key(name, group)

    def _name_blocks(self, stored: Stored, event: BlockStored) -> dict[int, int]:
        """Return the content of the event's blocks by hash, of those for which it follows from the tokens."""
        tokens, unit, size = event.token_ids, self._unit, event.block_size
        if not stored.blocks or not tokens or len(tokens) % unit or size % unit or not _is_text(event):
            return {}
        local = TokenBlocks(
            tokens, unit, salt=stored.salt or "", lora=stored.lora or ""
        ).identities.local_hashes
        parent = stored.parent_hash
        before = None
        if parent is not None:
            before = Identities.from_sequence_hashes([self._names.get(parent, parent)])
        ends: list[int] = Identities.from_local_hashes(local, parent=before).sequence_hashes.tolist()
        hashes = [block.sequence_hash for block in stored.blocks]
        is_certain = parent is None or parent in self._names
        if is_certain and len(hashes) * size == len(tokens):
            return dict(zip(hashes, ends[size // unit - 1 :: size // unit], strict=True))
        return {value: value for value in set(ends).intersection(hashes)}


class LearningReader:
    """Read an engine's messages as those of one group until they name several; then with a `GroupReader`.

    The first message with stored blocks decides: vLLM stores blocks of all groups in one step.
    """

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._groups: GroupReader | None = None
        self._is_decided = False
        self.labels: list[GroupLabel] = []
        """Groups by number; empty: not known yet, one, or not enough is known of them."""
        self.problem = ""
        """Why the groups other than the first are ignored."""

    @property
    def unnamed(self) -> int:
        """Stored blocks whose content is not known."""
        return 0 if self._groups is None else self._groups.unnamed

    def clear(self) -> None:
        """Forget all blocks."""
        if self._groups is not None:
            self._groups.clear()

    def read(self, payloads: Sequence[bytes]) -> WireColumns | GroupColumns:
        """Read messages in order."""
        if not self._is_decided:
            self._decide(payloads)
        return read_wire(payloads) if self._groups is None else self._groups.read(payloads)

    def _decide(self, payloads: Sequence[bytes]) -> None:
        for payload in payloads:
            try:
                found = _label_groups(decode_batch(payload))
            except MalformedBatch:
                continue
            if found:
                self._is_decided = True
                if len(found) > 1:
                    self._use(found)
                return

    def _use(self, labels: list[GroupLabel]) -> None:
        unit = gcd(*(label.block_size for label in labels))
        hidden = [label.kind for label in labels if label.kind not in LEARNABLE]
        if hidden:
            self.problem = f"events do not describe groups of kind {hidden[0]}"
        elif unit != self._unit:
            self.problem = (
                f"groups are hashed in units of {unit} tokens, this router's prompts in {self._unit}"
            )
        else:
            self.labels, self._groups = labels, GroupReader(unit)


def _label_groups(batch: WireBatch) -> list[GroupLabel]:
    """Return the groups of the batch's stored events, by number; a number without events has kind "unknown"."""
    found: dict[int, GroupLabel] = {}
    for event in batch.events:
        if isinstance(event, BlockStored) and not _is_foreign(event) and event.block_size > 0:
            group = event.group_idx or 0
            size = event.block_size if group not in found else max(event.block_size, found[group].block_size)
            kind = event.kv_cache_spec_kind or FULL_ATTENTION
            found[group] = GroupLabel(kind, event.kv_cache_spec_sliding_window, size)
    unknown = GroupLabel("unknown", None, 1)
    return [found.get(group, unknown) for group in range(max(found, default=-1) + 1)]


def _is_foreign(event: WireEvent) -> bool:
    """Return whether the event is not about the engine's own blocks in local memory."""
    if isinstance(event, AllBlocksCleared):
        return False
    return event.locality not in (None, "LOCAL") or event.ownership is not None


def _is_text(event: BlockStored) -> bool:
    return all(
        keys is None or (isinstance(keys, list) and all(isinstance(key, str) for key in keys))
        for keys in event.extra_keys or ()
    )


def _key(name: int, group: int) -> int:
    return name ^ (group * _GROUP_FACTOR & _MASK)

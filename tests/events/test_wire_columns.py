"""Two readers of the same bytes, one for people and one for routers, say the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy._core import read_wire, salt_hash, xxh3_64
from understudy.errors import InvalidArgument, MalformedBatch
from understudy.events.columns import EventKind
from understudy.events.consolidate import to_event_columns
from understudy.events.dialects import TIER_OF_MEDIUM, Dialect, known_dialects
from understudy.events.events import Cleared, Removed, Stored
from understudy.events.translate import from_wire
from understudy.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    WireBatch,
    decode_batch,
    encode_batch,
)

GOLDENS = sorted((Path(__file__).parents[1] / "golden" / "events").glob("*.json"))
Rows = list[tuple[int, int, int, list[int], list[int]]]


def rows_of(columns: Any) -> Rows:
    offsets = columns.offsets.tolist()
    return [
        (
            int(columns.kinds[i]),
            int(columns.tiers[i]),
            int(columns.parents[i]),
            columns.sequence_hashes[offsets[i] : offsets[i + 1]].tolist(),
            columns.local_hashes[offsets[i] : offsets[i + 1]].tolist(),
        )
        for i in range(len(columns.kinds))
    ]


def expected(payload: bytes) -> tuple[Rows, int, int]:
    """Rows, bad and ignored events, by way of the reader that interprets nothing."""
    batch = decode_batch(payload)
    rows: Rows = []
    bad, ignored = len(batch.bad), 0
    for said in batch.events:
        try:
            event = from_wire(said)
        except MalformedBatch:
            bad += 1
            continue
        if isinstance(event, Cleared):
            rows.append((EventKind.CLEARED, 0, 0, [], []))
            continue
        assert not isinstance(said, AllBlocksCleared)
        if event.group or said.ownership is not None or said.locality not in (None, "LOCAL"):
            ignored += 1
        elif isinstance(event, Stored) and event.blocks:
            hashes = [block.sequence_hash for block in event.blocks]
            local = [block.local_hash or 0 for block in event.blocks]
            rows.append((EventKind.STORED, int(event.tier), event.parent_hash or 0, hashes, local))
        elif isinstance(event, Removed) and event.blocks:
            hashes = [block.sequence_hash for block in event.blocks]
            rows.append((EventKind.REMOVED, int(event.tier), 0, hashes, [0] * len(hashes)))
    return rows, bad, ignored


def compare(payload: bytes) -> None:
    read = read_wire([payload])
    assert not read.malformed
    rows, bad, ignored = expected(payload)
    to_event_columns(read).check()
    assert (rows_of(read), read.bad_events, read.ignored_events) == (rows, bad, ignored)


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_recorded_batches_read_alike(path: Path) -> None:
    golden = json.loads(path.read_text())
    for recorded in golden["batches"]:
        compare(bytes.fromhex(recorded["hex"]))
    for recorded in golden["events"]:
        compare(msgspec.msgpack.encode([1.0, [msgspec.Raw(bytes.fromhex(recorded["hex"]))], None]))


hashes = st.one_of(
    st.integers(1, 40), st.integers(-(1 << 63), (1 << 64) - 1), st.binary(min_size=1, max_size=33)
)
names = st.none() | st.sampled_from(["a", "b", "GPU", ""])
media = st.sampled_from([*TIER_OF_MEDIUM, "MARS"])
keys = st.none() | st.lists(st.sampled_from(["a", "salt", ["mm", 3], 4]), max_size=3) | st.just("odd")


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    size = draw(st.integers(0, 4))
    blocks = draw(st.lists(hashes, max_size=5))
    count = draw(st.sampled_from([size * len(blocks), size * len(blocks), 0, 3]))
    return BlockStored(
        blocks,
        draw(st.none() | hashes),
        draw(st.lists(st.integers(0, 1 << 32), min_size=count, max_size=count)),
        size,
        draw(st.none() | st.integers(0, 3)),
        draw(media),
        draw(names),
        draw(st.none() | st.lists(keys, max_size=6)),
        draw(st.none() | st.integers(0, 1)),
        draw(st.none() | st.sampled_from(["full_attention", "sliding_window"])),
        draw(st.none() | st.integers(0, 4096)),
        locality=draw(st.sampled_from([None, "LOCAL", "REMOTE"])),
        ownership=draw(st.sampled_from([None, None, "fs"])),
        session_id=draw(names),
        cache_salt=draw(names),
    )


removed = st.builds(
    BlockRemoved,
    st.lists(hashes, max_size=5),
    media,
    st.none() | st.integers(0, 1),
    st.sampled_from([None, "LOCAL", "REMOTE"]),
    st.sampled_from([None, None, "fs"]),
)
said = st.lists(stored() | removed | st.builds(AllBlocksCleared), max_size=5)


def can_say(event: Any, rules: Dialect) -> Any:
    """The event without what the dialect has no field for."""
    event = msgspec.structs.replace(event)
    if isinstance(event, AllBlocksCleared):
        return event
    fields = rules.stored_fields if isinstance(event, BlockStored) else rules.removed_fields
    for name in event.__struct_fields__:
        if name not in fields and not (name == "cache_salt" and rules.salt_element):
            setattr(event, name, None)
    return event


@given(said, st.sampled_from(list(known_dialects())), st.none() | st.integers(0, 7))
def test_any_events_of_any_dialect_read_alike(events: list[Any], rules: Dialect, rank: int | None) -> None:
    payload = encode_batch(WireBatch(2.5, [can_say(event, rules) for event in events], rank), rules)
    compare(payload)
    read = read_wire([payload])
    assert read.ts.tolist() == [2.5]
    assert read.ranks.tolist() == [-1 if rank is None or not rules.has_rank else rank]


@given(said, st.sampled_from(list(known_dialects())))
def test_what_is_read_is_written_again_byte_for_byte(events: list[Any], rules: Dialect) -> None:
    payload = encode_batch(WireBatch(2.5, [can_say(event, rules) for event in events], 1), rules)
    batch = decode_batch(payload)
    assert not batch.bad
    assert encode_batch(batch, rules) == payload


OPTIONAL: dict[str, Any] = {
    "parent_block_hash": -7,
    "lora_id": 3,
    "medium": "GPU",
    "lora_name": "adapter",
    "extra_keys": [["salt"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
    "locality": "REMOTE",
    "ownership": "fs",
    "session_id": "s",
    "cache_salt": "pepper",
}


@pytest.mark.parametrize("rules", list(known_dialects()), ids=lambda rules: rules.name)
def test_every_choice_of_optional_fields_comes_back_in_every_dialect(rules: Dialect) -> None:
    choices = 0
    for make, fields in (
        (
            lambda **told: BlockStored([1, -2], token_ids=[5, 6, 7, 8], block_size=2, **told),
            rules.stored_fields,
        ),
        (lambda **told: BlockRemoved([1, -2], **told), rules.removed_fields),
    ):
        known = [
            name
            for name in OPTIONAL
            if name in fields or (name == "cache_salt" and rules.salt_element and "token_ids" in fields)
        ]
        for bits in range(1 << len(known)):
            event = make(**{name: OPTIONAL[name] for i, name in enumerate(known) if bits >> i & 1})
            payload = encode_batch(WireBatch(2.5, [event], 1), rules)
            read = decode_batch(payload)
            assert read.events == [event]
            assert encode_batch(read, rules) == payload
            choices += 1
            if bits.bit_count() <= 2:
                compare(payload)
    assert choices >= 5


def test_a_field_that_the_dialect_does_not_have_is_refused_by_name() -> None:
    old = next(known_dialects())
    event = BlockStored([1], None, [], 4, session_id="s")
    with pytest.raises(InvalidArgument, match=r"vllm-0\.9\.0 has no session_id in a BlockStored"):
        encode_batch(WireBatch(0.0, [event]), old)


def test_local_hashes_know_adapter_and_salt() -> None:
    tokens = [1, 2, 3, 4]
    data = b"".join(token.to_bytes(4, "little") for token in tokens)
    for fields, seed in (
        ({}, salt_hash()),
        ({"lora_name": "a"}, salt_hash(lora="a")),
        ({"cache_salt": "s"}, salt_hash(salt="s")),
        ({"extra_keys": [["a", "s"]], "lora_name": "a"}, salt_hash(salt="s", lora="a")),
    ):
        payload = msgspec.msgpack.encode([0.0, [BlockStored([7], None, tokens, 4, **fields)], 0])
        raw: dict[str, Any] = msgspec.msgpack.decode(payload)[1][0]
        raw["parent_block_hash"] = None
        read = read_wire([msgspec.msgpack.encode([0.0, [raw]])])
        assert read.local_hashes.tolist() == [xxh3_64(data, seed)]


def test_messages_are_read_in_one_go_and_those_that_are_none_are_named() -> None:
    good = msgspec.msgpack.encode([1.5, [["BlockRemoved", [1, 2], None]], 3])
    read = read_wire([good, b"\xc1", good, b"", good[:-1], good + b"\x00"])
    assert read.malformed == [1, 3, 4, 5]
    assert len(read.kinds) == 2
    assert read.ts.tolist() == [1.5, 0, 1.5, 0, 0, 0]
    assert read.ranks.tolist() == [3, -1, 3, -1, -1, -1]


def test_only_bytes_are_messages() -> None:
    with pytest.raises(InvalidArgument, match="payloads must be bytes"):
        read_wire(["text"])  # type: ignore[list-item]

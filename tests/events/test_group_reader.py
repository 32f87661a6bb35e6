"""Messages of engines with several KV cache groups become keys of content and group."""

from __future__ import annotations

import hashlib

import pytest

from understudy._core import TokenBlocks
from understudy.events.columns import EventKind
from understudy.events.dialects import dialect
from understudy.events.group_reader import GroupLabel, GroupReader, LearningReader
from understudy.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    WireBatch,
    WireEvent,
    encode_batch,
)

UNIT = 16
TOKENS = list(range(96))
NAMES: list[int] = TokenBlocks(TOKENS, UNIT).identities.sequence_hashes.tolist()
DIGESTS = [hashlib.sha256(bytes([end])).digest() for end in range(6)]
SECOND = 0x9E3779B97F4A7C15


def payload(*events: WireEvent) -> bytes:
    return encode_batch(WireBatch(1.0, list(events), 0), dialect("vllm-0.33.0"))


def stored(
    group: int, hashes: list[bytes], *, first: int = 0, last: int = 6, size: int = UNIT
) -> BlockStored:
    """Build an event of blocks `first` to `last`, of which only `hashes` are named."""
    parent = DIGESTS[first - 1] if first else None
    kind = ("sliding_window", 64) if group == 0 else ("full_attention", None)
    return BlockStored(
        list(hashes),
        parent,
        TOKENS[first * 16 : last * 16],
        size,
        medium="GPU",
        group_idx=group,
        kv_cache_spec_kind=kind[0],
        kv_cache_spec_sliding_window=kind[1],
    )


def rows(reader: GroupReader, *events: WireEvent) -> list[tuple[int, list[int]]]:
    read = reader.read([payload(*events)])
    assert (read.malformed, read.bad_events, read.ignored_events) == ([], 0, 0)
    bounds = read.offsets.tolist()
    keys = read.sequence_hashes.tolist()
    return [(kind, keys[bounds[at] : bounds[at + 1]]) for at, kind in enumerate(read.kinds.tolist())]


def test_a_hash_in_a_partly_named_range_gets_its_name_from_the_group_that_names_all() -> None:
    reader = GroupReader(UNIT)
    found = rows(reader, stored(0, DIGESTS[4:]), stored(1, DIGESTS))
    assert sorted(key for _, keys in found for key in keys) == sorted(
        [*NAMES[4:], *(name ^ SECOND for name in NAMES)]
    )
    assert reader.unnamed == 0
    assert rows(reader, BlockRemoved([DIGESTS[4]], "GPU", 0)) == [(EventKind.REMOVED, [NAMES[4]])]
    assert rows(reader, BlockRemoved([DIGESTS[5]], "GPU", 1)) == [(EventKind.REMOVED, [NAMES[5] ^ SECOND])]


def test_a_later_chunk_continues_the_content_of_its_parent() -> None:
    reader = GroupReader(UNIT)
    rows(reader, stored(0, [], last=3), stored(1, DIGESTS[:3], last=3))
    found = rows(reader, stored(0, DIGESTS[5:], first=3), stored(1, DIGESTS[3:], first=3))
    assert {key for _, keys in found for key in keys} == {NAMES[5], *(name ^ SECOND for name in NAMES[3:])}


def test_blocks_without_a_known_name_are_pending_until_they_leave() -> None:
    reader = GroupReader(UNIT)
    assert rows(reader, stored(0, DIGESTS[4:])) == []
    assert reader.unnamed == 2
    assert rows(reader, BlockRemoved([*DIGESTS[4:]], "GPU", 0)) == []
    assert reader.unnamed == 0


def test_hashes_that_are_content_need_no_other_group() -> None:
    reader = GroupReader(UNIT)
    event = stored(0, [])
    event.block_hashes = list(NAMES[4:])
    assert rows(reader, event) == [(EventKind.STORED, NAMES[4:])]


def test_a_wide_block_has_the_name_of_its_last_unit() -> None:
    found = rows(GroupReader(UNIT), stored(1, DIGESTS[1::2], size=2 * UNIT))
    assert found == [(EventKind.STORED, [name ^ SECOND for name in NAMES[1::2]])]


def test_a_cleared_cache_has_no_names() -> None:
    reader = GroupReader(UNIT)
    found = rows(reader, stored(1, DIGESTS), AllBlocksCleared(), BlockRemoved([DIGESTS[0]], "GPU", 1))
    assert [kind for kind, _ in found] == [EventKind.STORED, EventKind.CLEARED]


def test_unreadable_messages_are_counted() -> None:
    read = GroupReader(UNIT).read([b"nonsense", payload(stored(1, DIGESTS))])
    assert read.malformed == [0]
    assert len(read.kinds) == 1


def test_the_first_stored_blocks_say_which_groups_there_are() -> None:
    reader = LearningReader(UNIT)
    reader.read([payload(AllBlocksCleared())])
    assert reader.labels == []
    reader.read([payload(stored(0, DIGESTS[4:]), stored(1, DIGESTS))])
    assert reader.labels == [GroupLabel("sliding_window", 64, 16), GroupLabel("full_attention", None, 16)]
    assert reader.problem == ""


@pytest.mark.parametrize("what", ["chunked_local_attention", "unit"])
def test_groups_that_events_do_not_describe_enough_are_named(what: str) -> None:
    reader = LearningReader(UNIT if what != "unit" else 4)
    event = stored(0, DIGESTS)
    event.kv_cache_spec_kind = what if what != "unit" else event.kv_cache_spec_kind
    reader.read([payload(event, stored(1, DIGESTS))])
    assert reader.labels == []
    assert ("kind chunked_local_attention" if what != "unit" else "units of 16") in reader.problem

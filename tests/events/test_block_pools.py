"""Events that the block pools of vLLM's releases sent: converted from ours to equal bytes, and read by every reader."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from understudy._core import read_wire
from understudy.events.columns import EventKind
from understudy.events.consolidate import to_event_columns
from understudy.events.dialects import LAST, dialect
from understudy.events.events import Cleared, Removed, RemovedBlock, Stored, StoredBlock
from understudy.events.mirror import Mirror
from understudy.events.translate import from_wire, to_wire
from understudy.events.verify import Verifier
from understudy.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    WireBatch,
    decode_batch,
    encode_batch,
    live_frames,
)
from understudy.kv import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.events.events import PublishedEvent

RECORDED = sorted((Path(__file__).parents[1] / "golden" / "vllm-0.33" / "wire").glob("*.jsonl.gz"))
ADAPTER, ADAPTER_ID, SALT, SESSION, SIZE = "sql", 3, "pepper", "s-1", 4
HYBRID = [("full_attention", None), ("sliding_window", 8)]


@cache
def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines()]


def release(path: Path) -> str:
    return path.name.removesuffix(".jsonl.gz").removeprefix("v")


def cases(path: Path) -> Iterator[tuple[str, list[bytes]]]:
    for line in read(path)[1:]:
        if "absent" not in line:
            yield line["case"], [bytes.fromhex(batch["hex"]) for batch in line["batches"]]


@pytest.fixture(params=RECORDED, ids=release)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def ours(case: str, batch: WireBatch, positions: dict[int, int]) -> Iterator[PublishedEvent]:
    """What our engine reports for a recorded batch: blocks, tokens and the request's names, nothing of a release.

    Evictions of one call are one Removed, and copies of one job one Stored, as our store reports them.
    """
    for event in merged(batch.events):
        if isinstance(event, AllBlocksCleared):
            yield Cleared(0, 0)
            continue
        tier = Tier.G1 if event.medium == "GPU" else Tier.G2
        hashes = [number(value) for value in event.block_hashes]
        if isinstance(event, BlockRemoved):
            blocks = tuple(RemovedBlock(value, positions.get(value, 0), 0) for value in hashes)
            yield Removed(0, blocks, tier, 0, event.group_idx or 0)
            continue
        parent = None if event.parent_block_hash is None else number(event.parent_block_hash)
        first = 0 if parent is None else positions[parent] + 1
        stored = []
        for index, value in enumerate(hashes):
            positions.setdefault(value, first + index)
            tokens = tuple(event.token_ids[index * SIZE : (index + 1) * SIZE]) or None
            stored.append(StoredBlock(value, None, positions[value], 0, tokens))
        group = event.group_idx or 0
        attention, window = HYBRID[group]
        ahead = event.lookahead_token_ids
        yield Stored(
            0,
            parent,
            tuple(stored),
            tier,
            0,
            group,
            lora=ADAPTER if "lora" in case else None,
            lora_id=ADAPTER_ID if "lora" in case else None,
            salt=SALT if "salt" in case else None,
            session=SESSION if case == "session" else None,
            attention=attention,
            window=window,
            lookahead=None if ahead is None else tuple(map(tuple, ahead)),
        )


def merged(events: list[Any]) -> Iterator[Any]:
    last: Any = None
    for event in events:
        alike = type(event) is type(last) and not isinstance(event, AllBlocksCleared)
        if (
            alike
            and isinstance(event, BlockRemoved)
            and (event.medium, event.group_idx) == (last.medium, last.group_idx)
        ):
            last.block_hashes += event.block_hashes
            continue
        if alike and isinstance(event, BlockStored) and not event.block_size and not last.block_size:
            last.block_hashes += event.block_hashes
            continue
        if last is not None:
            yield last
        last = event
    if last is not None:
        yield last


def number(value: int | bytes) -> int:
    return value if isinstance(value, int) else int.from_bytes(value[-8:], "big")


def with_numbers(payload: bytes) -> bytes:
    """A payload with the low 64 bits of digests: 0.22 and 0.23 send whole digests of offloaded chunks."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    for event in events:
        if isinstance(event, list) and len(event) > 1:
            event[1] = list(map(number, event[1]))
    return msgspec.msgpack.encode([ts, events, rank])


def test_every_recorded_release_has_its_fields_and_the_newest_is_known(path: Path) -> None:
    header = read(path)[0]
    rules = dialect(f"vllm-{release(path)}")
    assert list(rules.stored_fields) == header["fields"]["BlockStored"]
    assert list(rules.removed_fields) == header["fields"]["BlockRemoved"]
    assert rules.array_events == header["array_events"]
    assert LAST["vllm"] == release(RECORDED[-1])


def test_our_events_become_the_bytes_that_the_block_pool_sent(path: Path) -> None:
    rules = dialect(f"vllm-{release(path)}")
    seen = set()
    for case, payloads in cases(path):
        positions: dict[int, int] = {}
        for payload in payloads:
            batch = decode_batch(payload)
            events = list(ours(case, batch, positions))
            native = case == "offload" or (case == "offload_self_describing" and rules.array_events)
            sent = to_wire(events, rules, block_size=SIZE, native_offload=native)
            expected = payload if not (native and rules.array_events) else with_numbers(payload)
            assert encode_batch(WireBatch(batch.ts, sent), rules) == expected, case
        seen.add(case)
    assert {"plain", "removed", "cleared", "salt", "lora", "lora_salt", "hybrid", "mtp"} <= seen


def test_every_recorded_batch_is_read_and_written_byte_for_byte(path: Path) -> None:
    rules = dialect(f"vllm-{release(path)}")
    for case, payloads in cases(path):
        for payload in payloads:
            batch = decode_batch(payload)
            assert not batch.bad
            assert encode_batch(batch, rules) == payload, case


def test_the_readers_agree_on_every_recorded_stream(path: Path) -> None:
    for case, payloads in cases(path):
        plain: set[tuple[int, int]] = set()
        fast: set[tuple[int, int]] = set()
        mirror = Mirror()
        for payload in payloads:
            batch = decode_batch(payload)
            mirror.apply(batch.events)
            columns = read_wire([payload])
            assert (columns.bad_events, len(columns.malformed)) == (0, 0), case
            for event in map(from_wire, batch.events):
                if isinstance(event, Cleared):
                    plain.clear()
                elif not event.group:
                    blocks = {(int(event.tier), block.sequence_hash) for block in event.blocks}
                    plain = plain | blocks if isinstance(event, Stored) else plain - blocks
            read_columns = to_event_columns(columns)
            offsets = read_columns.offsets.tolist()
            for i, kind in enumerate(read_columns.kinds.tolist()):
                hashes = read_columns.sequence_hashes[offsets[i] : offsets[i + 1]].tolist()
                told = {(int(read_columns.tiers[i]), value) for value in hashes}
                fast = (
                    set()
                    if kind == EventKind.CLEARED
                    else fast | told
                    if kind == EventKind.STORED
                    else fast - told
                )
        assert fast == plain, case
        dumped = {
            (2 if event.medium == "CPU" else 1, number(value))
            for event in mirror.dump()
            if not event.group_idx
            for value in event.block_hashes
        }
        assert dumped == plain, case


def test_verify_finds_nothing_in_what_a_block_pool_sent(path: Path) -> None:
    rules = dialect(f"vllm-{release(path)}")
    for case, payloads in cases(path):
        verifier = Verifier("raw", dialect=rules)
        found = [
            str(each)
            for sequence, payload in enumerate(payloads)
            for each in verifier.check_message(live_frames(b"kv", sequence, payload))
        ]
        assert found == [], case


def test_hashes_that_cover_the_next_token_keep_it_through_a_dump() -> None:
    (payloads,) = [payloads for case, payloads in cases(RECORDED[-1]) if case == "mtp"]
    mirror = Mirror()
    for payload in payloads:
        mirror.apply(decode_batch(payload).events)
    ahead = {tuple(event.token_ids): event.lookahead_token_ids for event in mirror.dump()}
    assert ahead[(100, 101, 102, 103)] == [[104]]
    assert ahead[(108, 109, 7, 7)] == [[7]]
    assert np.all([len(event.block_hashes) == 1 for event in mirror.dump()])


def test_offloaded_blocks_without_tokens_have_no_position() -> None:
    (payloads,) = [payloads for case, payloads in cases(RECORDED[-1]) if case == "offload"]
    events = [from_wire(event) for payload in payloads for event in decode_batch(payload).events]
    host = [event for event in events if isinstance(event, Stored) and event.tier == Tier.G2]
    assert host
    assert all(block.position == -1 for event in host for block in event.blocks)

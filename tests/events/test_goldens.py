"""Bytes recorded from the releases' own publishers: read, and written again byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from understudy.events.dialects import Dialect, dialect
from understudy.events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    WireBatch,
    decode_batch,
    decode_event,
    encode_batch,
    encode_event,
    live_frames,
    parse_frames,
    replay_frames,
)

GOLDENS = sorted((Path(__file__).parents[1] / "golden" / "events").glob("*.json"))
KINDS: dict[str, type[Any]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}


@pytest.fixture(params=GOLDENS, ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(request.param.read_text())
    return recorded


def spoken(golden: dict[str, Any]) -> Dialect:
    return dialect(f"{golden['producer']}-{golden['version']}")


def value_of(recorded: Any) -> Any:
    """As the event holds it: digests are bytes, arrays lists."""
    if isinstance(recorded, dict) and set(recorded) == {"$bytes"}:
        return bytes.fromhex(recorded["$bytes"])
    return [value_of(item) for item in recorded] if isinstance(recorded, list) else recorded


def test_there_are_recordings() -> None:
    assert len(GOLDENS) >= 25


def test_the_dialect_has_the_fields_of_the_recorded_structs(golden: dict[str, Any]) -> None:
    rules = spoken(golden)
    assert list(rules.stored_fields) == golden["stored_fields"]
    assert list(rules.removed_fields) == golden["removed_fields"]
    assert rules.array_events == golden["array_like"]


def test_every_event_is_read_as_it_was_meant_and_written_byte_for_byte(golden: dict[str, Any]) -> None:
    for recorded in golden["events"]:
        data = bytes.fromhex(recorded["hex"])
        event = decode_event(data)
        assert isinstance(event, KINDS[recorded["type"]])
        fields = {name: value_of(value) for name, value in recorded["fields"].items()}
        fields |= fields.pop("metadata", {})
        for name, value in fields.items():
            assert getattr(event, name) == value, recorded["name"]
        for name in set(event.__struct_fields__) - set(fields):
            assert getattr(event, name) is None, recorded["name"]
        assert encode_event(event, spoken(golden)) == data, recorded["name"]


def test_every_batch_is_read_and_written_byte_for_byte(golden: dict[str, Any]) -> None:
    for recorded in golden["batches"]:
        data = bytes.fromhex(recorded["hex"])
        batch = decode_batch(data)
        assert (batch.ts, batch.rank, batch.bad) == (recorded["ts"], recorded["rank"], [])
        assert [type(event).__name__ for event in batch.events] == recorded["events"]
        assert encode_batch(batch, spoken(golden)) == data


def test_frames_of_both_sockets_are_those_that_were_recorded(golden: dict[str, Any]) -> None:
    rules = spoken(golden)
    for recorded in golden["frames"]:
        topic = recorded["topic"].encode()
        assert recorded["port_offset"] == (recorded["data_parallel_rank"] if rules.has_rank else 0)
        for frames in recorded["live"]:
            raw = [bytes.fromhex(frame) for frame in frames]
            parsed = parse_frames(raw)
            assert parsed[0] == topic
            assert live_frames(*parsed) == raw
            assert encode_batch(decode_batch(parsed[2]), rules) == parsed[2]
        for frames in recorded["replay"]:
            raw = [bytes.fromhex(frame) for frame in frames]
            _, sequence, payload = parse_frames(raw)
            assert replay_frames(rules, topic, sequence, payload) == raw
        assert sequence == -1  # the last one ends the replay


def test_a_bad_event_leaves_the_others_of_its_batch(golden: dict[str, Any]) -> None:
    rules = spoken(golden)
    events = [decode_event(bytes.fromhex(recorded["hex"])) for recorded in golden["events"]]
    data = encode_batch(WireBatch(1.5, events), rules)
    tag = b"\xacBlockRemoved"
    at = data.index(tag)
    batch = decode_batch(data[:at] + b"\xacBlockRemovee" + data[at + len(tag) :])
    assert [(bad.index, "BlockRemovee" in bad.reason) for bad in batch.bad] == [
        (events.index(next(event for event in events if isinstance(event, BlockRemoved))), True)
    ]
    assert batch.events == [event for i, event in enumerate(events) if i != batch.bad[0].index]

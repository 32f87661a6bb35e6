"""Bytes that nobody meant: the readers count them, and neither fall over nor fill the memory."""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest

from events.following import removed, stored
from events.test_verify import stream as good_stream
from understudy._core import read_wire
from understudy.errors import MalformedBatch
from understudy.events.consolidate import Consolidator, to_event_columns
from understudy.events.dialects import known_dialects
from understudy.events.translate import from_wire
from understudy.events.verify import Verifier
from understudy.events.wire import WireBatch, WireEvent, decode_batch, encode_batch, parse_frames

FEW = 4000
MANY = int(os.environ.get("UNDERSTUDY_SOAK_OPS", "1000000"))
GOLDENS = sorted((Path(__file__).parents[1] / "golden" / "events").glob("*.json"))

# Heads of values that promise more than there is, values of other kinds, and nesting.
PIECES = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    b"\xdc\xff\xff",
    b"\xc1",
    b"\xc0",
    b"\xc3",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xa3\xff\xfe\xfd",
    b"\x91" * 200,
    b"\x81\xa1a" * 200,
    b"\xd6\xff\x00\x00\x00\x00",
]


def seeds() -> list[bytes]:
    found = []
    for path in GOLDENS:
        golden = msgspec.json.decode(path.read_bytes())
        found += [bytes.fromhex(batch["hex"]) for batch in golden["batches"]]
        for event in golden["events"]:
            found.append(msgspec.msgpack.encode([1.0, [msgspec.Raw(bytes.fromhex(event["hex"]))], 0]))
    return found


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1 << 63,
    1.5,
    "GPU",
    "",
    b"",
    b"\x01" * 32,
    [],
    [[]],
    {},
    {"cache_salt": 3},
    [1, 1],
]


def mutated(source: random.Random, payload: bytes) -> bytes:
    """Bytes changed anywhere, or a sound message with a value of another kind in it."""
    if source.random() < 0.5:
        batch = msgspec.msgpack.decode(payload)
        at: Any = batch
        while True:
            places = list(range(len(at)) if isinstance(at, list) else at)
            if not places:
                break
            place = source.choice(places)
            if isinstance(at[place], list | dict) and at[place] and source.random() < 0.8:
                at = at[place]
                continue
            at[place] = source.choice(ODD)
            break
        return msgspec.msgpack.encode(batch)
    data = bytearray(payload)
    for _ in range(source.randrange(1, 4)):
        at = source.randrange(len(data) + 1)
        match source.randrange(7):
            case 0:
                del data[at:]  # cut
            case 1 if data:
                data[at % len(data)] = source.randrange(256)
            case 2:
                data[at:at] = source.choice(PIECES)
            case 3:
                stop = min(len(data), at + source.randrange(1, 9))
                data[at:stop] = source.choice(PIECES)
            case 4:
                del data[at : at + source.randrange(1, 9)]
            case 5:
                data[at:at] = data[at : at + source.randrange(1, 40)]
            case _:
                data[at:at] = source.randbytes(source.randrange(1, 9))
    return bytes(data)


def read_everything(payload: bytes, truth: Consolidator) -> tuple[bool, int]:
    """Both readers, and what stands behind them; (readable, bad events) as they say."""
    native = read_wire([payload])
    columns = to_event_columns(native)
    columns.check()
    truth.apply(columns).check()
    try:
        batch = decode_batch(payload)
    except MalformedBatch:
        return not native.malformed, native.bad_events
    for event in batch.events:
        try:
            from_wire(event)
        except MalformedBatch:
            continue
    return not native.malformed, native.bad_events


def fuzz(inputs: int, seed: int) -> tuple[int, int, int]:
    source, known, truth = random.Random(seed), seeds(), Consolidator(max_blocks=1000)
    good = bad = broken = 0
    for _ in range(inputs):
        readable, bad_events = read_everything(mutated(source, source.choice(known)), truth)
        broken += not readable
        bad += bad_events > 0
        good += readable and not bad_events
        assert len(truth) <= 1000
    return good, bad, broken


def test_mutated_messages_are_read_refused_or_counted() -> None:
    good, bad, broken = fuzz(FEW, 0)
    assert min(good, bad, broken) > FEW / 20  # all three happen, so that the test means something


@pytest.mark.soak
def test_a_million_mutated_messages_leave_no_trace() -> None:
    fuzz(20_000, 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    fuzz(MANY, 2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024


def test_random_bytes_are_no_messages() -> None:
    source, truth = random.Random(3), Consolidator()
    for _ in range(FEW):
        read_everything(source.randbytes(source.randrange(60)), truth)
    assert len(truth) == 0


def test_every_cut_of_a_message_is_refused_as_a_whole() -> None:
    for rules in known_dialects():
        medium = "GPU" if rules.media else None
        events: list[WireEvent] = [stored(1, 2, 3, medium=medium), removed(3, medium=medium)]
        payload = encode_batch(WireBatch(1.0, events, 0), rules)
        assert read_wire([payload[:cut] for cut in range(len(payload))]).malformed == list(
            range(len(payload))
        )
        for cut in range(len(payload)):
            with pytest.raises(MalformedBatch):
                decode_batch(payload[:cut])


@pytest.mark.parametrize("piece", PIECES)
def test_a_length_that_is_a_lie_costs_nothing(piece: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for payload in (piece, b"\x93" + piece, b"\x93\xcb" + b"\x00" * 8 + piece + b"\xc0"):
        read_everything(payload, Consolidator())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 * 1024


def test_both_readers_agree_on_what_is_a_batch() -> None:
    # They may differ in text that is no text, and in nesting beyond all measure, which one of them never looks at.
    source, known = random.Random(4), seeds()
    different = 0
    for _ in range(FEW):
        payload = mutated(source, source.choice(known))
        native = read_wire([payload])
        try:
            decode_batch(payload)
            readable = True
        except MalformedBatch:
            readable = False
        different += readable == bool(native.malformed)
    assert different <= FEW / 100


def test_hashes_that_collide_are_told_by_the_kit() -> None:
    messages = good_stream()
    verifier = Verifier("raw")
    assert not [breach for frames in messages for breach in verifier.check_message(frames)]
    source = random.Random(5)
    for _ in range(300):
        at = source.randrange(len(messages))
        topic, sequence, payload = parse_frames(messages[at])
        verifier = Verifier("raw")
        changed: list[Any] = [*messages[:at], [topic, sequence.to_bytes(8, "big"), mutated(source, payload)]]
        for frames in [*changed, *messages[at + 1 :]]:
            verifier.check_message(frames)
        assert verifier.messages == len(messages)

"""The kit finds every fault that is sown in a stream, by the name of its rule, and nothing in a stream without one."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from events.following import SIZE, removed, stored
from replay.building import single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.events.dialects import dialect, known_dialects
from understudy.events.emit import merge_wire_batches
from understudy.events.verify import RULES, Verifier
from understudy.events.wire import AllBlocksCleared, BlockStored, WireBatch, encode_batch, live_frames
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.events import Stream

RULES_OF = dialect("vllm-0.24.0")
Message = list[bytes]


def message(sequence: int, events: list[Any], ts: float | None = None, rank: int | None = 0) -> Message:
    batch = WireBatch(100.0 + sequence if ts is None else ts, events, rank)
    return live_frames(b"kv", sequence, encode_batch(batch, RULES_OF))


def stream() -> list[Message]:
    """A good one, raw and consolidated alike."""
    return [
        message(0, [stored(1, 2, 3)]),
        message(1, [stored(4, parent=3), stored(9)]),
        message(2, [stored(2, parent=1, medium="CPU")]),
        message(3, [removed(4), removed(3)]),
        message(4, [stored(3, 5, parent=2)]),
        message(5, [removed(2, medium="CPU")]),
        message(6, [AllBlocksCleared()]),
        message(7, [stored(2, 4)]),
    ]


def replaced(at: int, new: Message) -> Callable[[list[Message]], None]:
    return lambda messages: messages.__setitem__(at, new)


def with_events(at: int, *events: Any) -> Callable[[list[Message]], None]:
    return replaced(at, message(at, list(events)))


def edited(at: int, old: bytes, new: bytes) -> Callable[[list[Message]], None]:
    def edit(messages: list[Message]) -> None:
        assert old in messages[at][2]
        messages[at][2] = messages[at][2].replace(old, new)

    return edit


def with_payload(at: int, value: Any) -> Callable[[list[Message]], None]:
    return replaced(at, live_frames(b"kv", at, msgspec.msgpack.encode(value)))


def field(**changes: Any) -> BlockStored:
    return msgspec.structs.replace(stored(4, parent=3), **changes)


def plain(event: Any) -> Any:
    return {"type": type(event).__name__} | msgspec.to_builtins(event)


FAULTS: dict[str, tuple[str, Callable[[list[Message]], Any]]] = {
    "a message is lost": ("gap", lambda messages: messages.pop(2)),
    "a message comes twice": ("order", lambda messages: messages.insert(3, messages[2])),
    "two messages change places": ("order", lambda messages: messages.insert(2, messages.pop(1))),
    "the sequence begins anew": (
        "order",
        lambda messages: messages.append(message(0, [stored(30)], ts=200.0)),
    ),
    "a frame is missing": ("frames", lambda messages: messages[2].pop(0)),
    "a sequence number is cut": ("frames", lambda messages: messages[2].__setitem__(1, b"\0" * 7)),
    "the topic changes": ("topic", lambda messages: messages[3].__setitem__(0, b"other")),
    "a payload is cut": ("batch", lambda messages: messages[2].__setitem__(2, messages[2][2][:-3])),
    "a payload is none": ("batch", lambda messages: messages[2].__setitem__(2, b"\xc1")),
    "a payload is no array": ("batch", with_payload(2, {"ts": 1.0})),
    "an event of no kind": ("event", edited(1, b"BlockStored", b"BlockStolen")),
    "a hash that is text": ("event", with_payload(1, [101.0, [plain(field(block_hashes=["4"]))], 0])),
    "an event without hashes": (
        "event",
        with_payload(1, [101.0, [{"type": "BlockRemoved", "medium": "GPU"}], 0]),
    ),
    "a block twice in one event": ("event", with_events(1, stored(4, 5, 4, parent=3))),
    "a block that is its own parent": ("event", with_events(1, stored(4, parent=4))),
    "a hash that is none": ("event", with_events(1, field(block_hashes=[0]))),
    "a medium that nobody knows": ("event", with_events(1, field(medium="MARS"))),
    "a medium of another release": ("dialect", with_events(1, field(medium="CPU_PINNED"))),
    "a field of a newer release": (
        "dialect",
        with_payload(1, [101.0, [plain(field(session_id="s"))], 0]),
    ),
    "the array of an older release": (
        "dialect",
        with_payload(1, [101.0, [["BlockStored", [4], 3, [4, 5, 6, 7], SIZE, None, "GPU"]], 0]),
    ),
    "a token that is too large": ("event", with_events(1, field(token_ids=[1, 2, 3, 1 << 32]))),
    "tokens are missing": ("tokens", with_events(1, field(token_ids=[1, 2, 3]))),
    "the block size changes": ("block_size", with_events(1, field(block_size=2, token_ids=[1, 2]))),
    "a block size of nothing": ("block_size", with_events(1, field(block_size=0, token_ids=[]))),
    "a child before its parent": ("parent", with_events(1, stored(5, parent=4), stored(4, parent=3))),
    "a parent that never was": ("parent", with_events(1, stored(4, parent=77))),
    "a parent that has gone": ("parent", with_events(4, stored(5, parent=3))),
    "a hash with other tokens": (
        "identity",
        with_events(2, BlockStored([2], 1, [9] * SIZE, SIZE, medium="CPU")),
    ),
    "a hash with another parent": ("identity", with_events(2, stored(2, parent=9, medium="CPU"))),
    "a block leaves that never came": ("unknown", with_events(3, removed(77))),
    "a block leaves twice": ("unknown", with_events(3, removed(4), removed(4))),
    "a block leaves after all was cleared": ("unknown", with_events(7, removed(1))),
    "a block leaves the wrong tier": ("tier", with_events(5, removed(1, medium="CPU"))),
    "the rank changes": ("rank", replaced(3, message(3, [removed(4), removed(3)], rank=1))),
    "time goes back": ("time", replaced(3, message(3, [removed(4), removed(3)], ts=1.0))),
    "a time that is none": ("time", edited(3, struct.pack(">d", 103.0), struct.pack(">d", float("nan")))),
    "an event without blocks": ("empty", with_events(3, removed())),
}
SECOND = ("a block is stored twice", "stored_twice", with_events(1, stored(2, parent=1)))


def breaches(messages: list[Message], kind: Stream = "raw", **options: Any) -> list[str]:
    verifier = Verifier(kind, dialect=RULES_OF, **options)
    found = [breach for frames in messages for breach in verifier.check_message(frames)]
    assert verifier.messages == len(messages)
    for breach in found:
        assert breach.rule in RULES
        assert str(breach).startswith(f"message {breach.message}")
    return [breach.rule for breach in found]


@pytest.mark.parametrize("kind", ["raw", "consolidated"])
def test_a_good_stream_breaks_nothing(kind: Stream) -> None:
    assert breaches(stream(), kind) == []


def test_there_are_faults_of_every_rule() -> None:
    assert len(FAULTS) >= 20
    assert {rule for rule, _ in FAULTS.values()} | {"stored_twice"} == set(RULES)


@pytest.mark.parametrize("kind", ["raw", "consolidated"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_sown_fault_is_found_by_its_rule(fault: str, kind: Stream) -> None:
    rule, sow = FAULTS[fault]
    messages = stream()
    sow(messages)
    assert rule in breaches(messages, kind)


def test_copies_are_a_fault_of_the_consolidated_stream_alone() -> None:
    _, rule, sow = SECOND
    messages = stream()[:3]
    sow(messages)
    assert breaches(messages, "consolidated") == [rule]
    assert breaches(messages, "raw") == []
    # Both copies leave: the first of them was early for who does not count.
    copies = [
        message(0, [stored(1)]),
        message(1, [stored(1)]),
        message(2, [removed(1)]),
        message(3, [removed(1)]),
    ]
    assert breaches(copies, "raw") == []
    assert breaches(copies, "consolidated") == ["stored_twice", "unknown"]


def test_one_who_joined_late_cannot_know_what_was_before() -> None:
    messages = stream()[3:]
    assert breaches(messages) == ["gap", "tier"] or "gap" in breaches(messages)
    assert breaches([*messages[:1], *messages[3:]], from_start=False) == ["gap"]
    assert breaches(messages, from_start=False) == []


@pytest.mark.parametrize("kind", ["raw", "consolidated"])
@pytest.mark.parametrize("rules", list(known_dialects()), ids=lambda rules: rules.name)
def test_what_a_replay_emits_keeps_every_rule_in_every_dialect(rules: Any, kind: Stream) -> None:
    content = [[1 + i // 10, 2, 3, 4] for i in range(100)]
    workload = single_turns([64] * 100, 4, content=content, arrival_ms=[i // 10 for i in range(100)])
    run = run_offline(RunPlan(workload, VllmConfig(block_size=16, num_gpu_blocks=60), workers=2, events=True))
    assert run.kv is not None
    publishers: list[Any] = [run.kv.events(worker, kind) for worker in range(2)]
    verifiers = [Verifier(kind, dialect=rules) for _ in range(2)]
    for time_ns, worker, events in merge_wire_batches(publishers, rules, block_size=16):
        payload = encode_batch(WireBatch(time_ns / 1e9, events, worker), rules)
        found = verifiers[worker].check_message(live_frames(b"", verifiers[worker].messages, payload))
        assert [str(breach) for breach in found] == []
    assert all(verifier.blocks > 50 for verifier in verifiers)

"""An engine that has served many requests is as large as a fresh one, and knows the ids of those that have ended."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.building import MS, constant, engine_for
from engines.test_scripted_clock import content
from understudy.errors import InvalidArgument

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@BOTH
def test_slots_and_step_ends_are_used_again(asynchronous: bool) -> None:
    engine = engine_for(
        {"block_size": 4, "num_blocks": 33, "async_scheduling": asynchronous}, timing=constant(0.0, 1.0)
    )
    identities = content(1, 12)
    kept = 0
    for number in range(60_000):
        assert engine.submit("r", 8, 4, identities) == number
        if number % 3 == 2:
            effects = engine.advance(engine.now_ns + 20 * MS)
            assert [record.id for record in effects.finished] == [number - 2, number - 1, number]
            kept = max(kept, engine.steps_kept)
    assert engine.idle
    assert engine.steps == 80_000
    assert engine.num_slots == 3
    assert kept <= 1_024 + 20  # and not as many as there were
    engine.check()


def test_a_request_that_stays_keeps_the_ends_of_its_steps() -> None:
    engine = engine_for({"block_size": 64, "num_blocks": 4000}, timing=constant(0.0, 1.0))
    long = engine.submit("long", 8, 120_000, content(1, 120_008, 64))
    engine.advance(100_000 * MS)
    assert engine.steps_kept == 100_000
    (record,) = engine.advance(200_000 * MS).finished
    assert (record.id, record.output_tokens) == (long, 120_000)
    assert (record.first_token_ns, record.second_token_ns) == (MS, 2 * MS)
    assert record.last_token_ns == 120_000 * MS


def test_the_id_of_a_request_that_has_ended_is_known_as_such_though_its_slot_is_in_use() -> None:
    engine = engine_for({"block_size": 4, "num_blocks": 33})
    first = engine.submit("first", 8, 1, content(1, 9))
    (record,) = engine.advance(10 * MS).finished
    assert (record.id, record.name, record.reason) == (first, "first", "length")
    second = engine.submit("second", 8, 5, content(1, 13))
    assert (engine.num_slots, second) == (1, 1)
    with pytest.raises(InvalidArgument, match="request 0 has ended, or was never submitted"):
        engine.emitted(first)
    with pytest.raises(InvalidArgument, match="request 7 has ended, or was never submitted"):
        engine.emitted(7)
    assert not engine.cancel(first, engine.now_ns).finished
    assert not engine.cancel(7, engine.now_ns).finished
    assert engine.emitted(second) == 0


def test_a_token_in_flight_for_a_cancelled_request_does_not_reach_the_one_that_has_its_slot() -> None:
    engine = engine_for({"block_size": 4, "num_blocks": 33, "async_scheduling": True})
    gone = engine.submit("gone", 8, 9, content(1, 17))
    engine.begin_step(0)
    engine.end_step(MS)
    assert engine.cancel(gone, MS).finished
    other = engine.submit("other", 8, 9, content(100, 17))
    assert engine.num_slots == 1
    engine.begin_step(MS)
    assert (engine.batch, engine.scheduled) == ([(gone, 1)], [(other, 8)])
    assert engine.end_step(2 * MS).tokens == []
    engine.begin_step(2 * MS)
    assert engine.end_step(3 * MS).tokens == [(other, 1)]


@pytest.mark.skipif(
    "asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps what was freed"
)
def test_an_engine_whose_steps_all_differ_in_length_does_not_grow_with_them() -> None:
    engine = engine_for({"block_size": 64, "num_blocks": 400}, timing=constant(0.0, 1.0))

    def serve(steps: range) -> None:
        for number in steps:
            if engine.idle:
                engine.submit("r", 8, 3_000, content(1, 3_008, 64))
            engine.begin_step(engine.now_ns)
            engine.end_step(engine.now_ns + MS + number)

    serve(range(20_000))
    before = resident_bytes()
    serve(range(20_000, 320_000))
    assert resident_bytes() - before < 2_000_000  # 16 bytes a step would be 4.8 million

"""Loads whose request is cancelled, loads that fail, and loads that are not worth their time."""

from __future__ import annotations

from tiers.building import MS, Worker, chain, reader_of, tiers
from tiers.onboarding import G2, on_host
from understudy import _core


def test_a_cancelled_load_keeps_its_room_until_its_bytes_have_come() -> None:
    worker = on_host(2)
    start = worker.now_ns / MS
    request = worker.submit(1, 9)
    worker.begin()
    assert worker.active() == 2
    assert worker.engine.cancel(request, round((start + 0.5) * MS)).finished
    assert (worker.engine.parked, worker.active(), worker.engine.idle) == (0, 2, True)
    worker.land(start + 2 - 1 / MS)
    assert worker.active() == 2
    worker.land(start + 2)
    assert worker.active() == 0
    assert worker.engine.wake_ns is None


def test_a_load_that_is_cancelled_while_staged_starts_no_second_part() -> None:
    reader, _ = reader_of([(chain(1), 1)], 4)
    start = reader.now_ns / MS
    request = reader.submit(1, 5)
    reader.begin()
    assert reader.engine.cancel(request, round((start + 0.5) * MS)).finished
    assert reader.active() == 1
    reader.land(start + 1)
    assert (reader.active(), reader.engine.wake_ns) == (0, None)
    assert reader.events() == [("stored", G2, 1001)]
    assert reader.answers(1, 1) == [("hit", G2)]


def test_a_load_that_is_cancelled_in_its_second_part_keeps_its_room_to_the_end() -> None:
    reader, _ = reader_of([(chain(1), 1)], 4)
    start = reader.now_ns / MS
    request = reader.submit(1, 5)
    reader.begin()
    reader.land(start + 1.5)
    assert reader.engine.cancel(request, reader.now_ns).finished
    assert reader.active() == 1
    reader.land(start + 2)
    assert reader.engine.tier_blocks(_core.Tier.G1) == (3, 0, 1, 0)  # it came, so it is cached


def test_a_cancelled_request_leaves_those_who_joined_its_load() -> None:
    reader, _ = reader_of([(chain(1), 1)], 4)
    start = reader.now_ns / MS
    first, second = reader.submit(1, 5), reader.submit(1, 6)
    reader.begin()
    reader.engine.cancel(first, reader.now_ns)
    reader.step(start + 2)
    assert reader.engine.admitted == [(second, False, 4)]


def test_a_request_of_the_same_name_waits_for_its_own_load() -> None:
    worker = on_host(2)
    start = worker.now_ns / MS
    old = worker.submit(1, 9, name="twin")
    worker.begin()
    worker.engine.cancel(old, worker.now_ns)
    new = worker.submit(2, 9, name="twin")
    worker.step(start + 1)  # on the device: it does not wait, and not for that
    assert worker.engine.admitted == [(new, False, 8)]
    assert not worker.engine.cancel(old, worker.now_ns).finished


def test_a_load_that_is_not_worth_it_is_counted_once_however_long_the_request_waits_for_room() -> None:
    worker = Worker(4, tiers(recompute_fallback=True, offload_batch_size=1), step_ms=0.0)
    worker.cache(1, 3)
    worker.cache(2, 4)
    request = worker.submit(1, 13)
    assert not worker.begin()
    assert not worker.begin(worker.now_ns / MS + 0.5)
    worker.play()
    assert worker.below_tokens(request) == (0, 0, 0)
    assert worker.tier_waits(request)[1] > 0
    assert worker.engine.tier_totals.slow_loads == 1


def test_a_load_that_fails_is_computed_and_owns_nothing_afterwards() -> None:
    worker = on_host(4, onboard_failure_rate=1.0)
    request = worker.submit(1, 17)
    worker.play()
    assert worker.emitted(request) == 1
    assert worker.engine.tier_totals.failed_loads == 1
    assert worker.below_tokens(request) == (0, 0, 0)
    assert worker.tier_waits(request) == (4 * MS, 0)
    assert worker.active() == 0

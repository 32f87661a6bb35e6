"""A subscriber follows its publisher through gaps, restarts and confusion, and never believes in ghosts."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import pytest

from events.following import PlainView, follow, publisher, removed, stored
from understudy.events.dialects import known_dialects
from understudy.events.publisher import Publisher
from understudy.events.subscriber import Subscriber
from understudy.events.wire import AllBlocksCleared, WireBatch, encode_batch, live_frames

if TYPE_CHECKING:
    from collections.abc import Iterator


NAMED = sorted({rules.name for rules in known_dialects()})


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="understudy.events")


def joined(source: Publisher, view: PlainView) -> None:
    """Say something until it is heard: a subscription takes a moment."""
    while not view.subscriber.counters.messages:
        source.publish([stored(1)])
        source.publish([removed(1)])
        view.poll(10)
    view.until(lambda: view.subscriber._next == source.next_sequence)


@pytest.fixture(params=[True, False], ids=["replay", "alone"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Publisher, PlainView]]:
    with publisher() as source:
        view = follow(source, replay=request.param)
        with view.subscriber:
            joined(source, view)
            yield source, view


def lose(source: Publisher, *batches: Any) -> None:
    """Published, and lost on the way."""
    for batch in batches:
        source.publish(batch, lost=True)


def test_what_is_published_arrives_in_order(pair: tuple[Publisher, PlainView]) -> None:
    source, view = pair
    for i in range(100):
        source.publish([stored(1000 + i)])
        if i % 2:
            source.publish([removed(1000 + i)])
    view.until(lambda: view.subscriber._next == source.next_sequence)
    assert view.hashes == {1000 + i for i in range(0, 100, 2)}
    assert view.subscriber.counters.gaps == 0


@pytest.mark.parametrize("name", NAMED)
def test_a_gap_is_filled_in_the_framing_of_every_dialect(name: str) -> None:
    with publisher(dialect=name) as source:
        view = follow(source)
        medium = "GPU" if source.dialect.media else None
        with view.subscriber:
            source.publish([stored(9, medium=medium)])
            while not view.subscriber.counters.messages:
                source.publish([stored(1, medium=medium), removed(1, medium=medium)])
                view.poll(10)
            lose(source, [stored(2, 3, medium=medium)], [removed(2, medium=medium)])
            source.publish([stored(4, parent=3, medium=medium)])
            view.until(lambda: 4 in view.hashes)
            assert view.hashes == {9, 3, 4}
            assert view.subscriber.counters.gaps == 1
            assert view.subscriber.state == "live"


def test_one_who_comes_late_learns_what_was_said_before() -> None:
    with publisher() as source:
        for i in range(50):
            source.publish([stored(100 + i)])
        view = follow(source)
        with view.subscriber:
            while not view.hashes:
                source.publish([stored(7)])
                view.poll(10)
            view.until(lambda: view.subscriber._next == source.next_sequence)
            assert view.hashes == {7, *range(100, 150)}
            assert view.subscriber.state == "live"


def test_a_ring_that_has_wrapped_is_made_good_by_a_dump() -> None:
    with publisher(buffer_steps=4) as source:
        view = follow(source)
        with view.subscriber:
            joined(source, view)
            source.publish([stored(10, 11, 12)])
            source.publish([stored(11, parent=10)])  # a second copy
            source.publish([stored(30, medium="CPU")])
            view.until(lambda: len(view.blocks) == 4)
            before = view.clears, view.subscriber.counters.dumped_messages
            lose(source, [removed(12)], *([stored(100 + i)] for i in range(20)), [removed(105)])
            source.publish([stored(200)])
            view.until(lambda: 200 in view.hashes)
            assert view.blocks == {
                *((1, value) for value in (10, 11, 200, *range(100, 120)) if value != 105),
                (2, 30),
            }
            assert (view.clears, view.subscriber.counters.dumped_messages) == (before[0] + 1, before[1] + 1)
            assert view.subscriber.state == "live"


def test_a_publisher_that_cannot_dump_leaves_a_view_without_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    with publisher(buffer_steps=4) as source:
        monkeypatch.setattr(source, "_encode_dump", list)  # as vLLM: nothing is so far, here is the end
        view = follow(source)
        with view.subscriber:
            joined(source, view)
            source.publish([stored(10)])
            view.until(lambda: 10 in view.hashes)
            before = view.subscriber.counters.partial_views  # a late start has one too
            lose(source, *([removed(10)] if i == 0 else [stored(100 + i)] for i in range(20)))
            source.publish([stored(200)])
            view.until(lambda: 200 in view.hashes)
            assert view.hashes == {200}
            assert view.subscriber.state == "partial"
            assert view.subscriber.counters.partial_views == before + 1


def test_without_a_replay_socket_a_gap_clears_what_was_known() -> None:
    with publisher(replay=None) as source:
        view = follow(source, replay=False)
        with view.subscriber:
            joined(source, view)
            source.publish([stored(10)])
            view.until(lambda: 10 in view.hashes)
            lose(source, [removed(10)])
            source.publish([stored(11)])
            view.until(lambda: 11 in view.hashes)
            assert view.hashes == {11}
            assert view.subscriber.state == "partial"


def test_a_restart_is_seen_by_the_sequence_that_goes_back() -> None:
    first = publisher()
    endpoint, replay = first.endpoint, first.replay
    view = follow(first)
    with view.subscriber:
        joined(first, view)
        first.publish([stored(10, 11)])
        view.until(lambda: 11 in view.hashes)
        first.close()
        with publisher(endpoint, replay=replay) as second:
            second.publish([stored(20)])
            view.until(lambda: 20 in view.hashes)
            assert view.hashes == {20}
            assert view.subscriber.counters.restarts >= 1
            assert view.subscriber.state == "live"


def test_a_restart_without_a_word_leaves_no_ghosts() -> None:
    first = publisher()
    endpoint, replay = first.endpoint, first.replay
    view = follow(first)
    with view.subscriber:
        joined(first, view)
        first.publish([stored(10)])
        view.until(lambda: 10 in view.hashes)
        first.close()
        with publisher(endpoint, replay=replay):
            view.until(lambda: not view.hashes)
            assert view.subscriber.counters.restarts == 1


def test_a_restart_that_has_passed_the_old_sequence_leaves_no_ghosts() -> None:
    # Nothing goes back: the new one is already further. But message 2 is not what it was.
    first = publisher(clock=lambda: 1.0)
    endpoint, replay = first.endpoint, first.replay
    view = follow(first)
    with view.subscriber:
        joined(first, view)
        first.publish([stored(10)])
        view.until(lambda: 10 in view.hashes)
        count = first.next_sequence
        first.close()
        with publisher(endpoint, replay=replay, clock=lambda: 2.0) as second:
            for i in range(count + 5):
                second.publish([stored(100 + i)])
            view.until(lambda: 100 in view.hashes)
            second.publish([stored(99)])
            view.until(lambda: 99 in view.hashes)
            assert view.hashes == {99, *range(100, 105 + count)}
            assert view.subscriber.counters.restarts >= 1


def test_a_message_that_comes_twice_counts_once(pair: tuple[Publisher, PlainView]) -> None:
    source, view = pair
    source.publish([stored(9)])
    view.until(
        lambda: view.subscriber._next == source.next_sequence
    )  # met: what it missed has come by replay
    before = view.subscriber.counters.duplicates
    source.publish([stored(10)])
    frames = live_frames(b"", *source._ring[-1])
    source._pub.send_multipart(frames)
    source.publish([stored(11)])
    view.until(lambda: view.subscriber._next == source.next_sequence)
    assert view.hashes == {9, 10, 11}
    assert view.subscriber.counters.duplicates == before + 1
    assert view.subscriber.counters.restarts == 0


def test_two_publishers_under_one_name_are_found_and_nothing_of_them_believed() -> None:
    subscriber = Subscriber("tcp://127.0.0.1:*", bind=True)
    view = PlainView(subscriber)
    with subscriber:
        one = Publisher(subscriber.endpoint, clock=lambda: 1.0)
        two = Publisher(subscriber.endpoint, clock=lambda: 2.0)
        with one, two:
            one.publish([stored(1)])
            for _ in range(50):
                one.publish([stored(1)])
            deadline = time.monotonic() + 20
            while not subscriber.counters.conflicts and time.monotonic() < deadline:
                one.publish([stored(10)])
                two.publish([stored(20)])
                view.poll(5)
            assert subscriber.counters.conflicts == 1
            for _ in range(20):
                one.publish([stored(10)])
                two.publish([stored(20)])
                view.poll(5)
            assert subscriber.state == "conflict"
            assert view.hashes == set()
        # One of them has gone: the other is believed again, after a while.
        with Publisher(subscriber.endpoint) as alone:
            deadline = time.monotonic() + 20
            while 30 not in view.hashes and time.monotonic() < deadline:
                alone.publish([stored(30)])
                view.poll(2)
            assert view.hashes == {30}
            assert view.subscriber.state == "partial"


def test_a_publisher_that_nobody_can_ask_keeps_nothing() -> None:
    with Publisher("tcp://127.0.0.1:*") as source:
        for i in range(1, 100):
            source.publish([stored(i)])
        assert not source._ring
        assert len(source._mirror) == 0


def test_a_subscriber_that_never_reads_costs_the_publisher_nothing() -> None:
    with publisher(hwm=10) as source:
        view = follow(source, hwm=10)
        with view.subscriber:
            joined(source, view)
            began = time.monotonic()
            for i in range(1, 3000):
                source.publish([stored(5000 + i), removed(5000 + i)])
            assert time.monotonic() - began < 20  # it never waited
            assert len(source._ring) == 1000
            # It wakes, finds that messages are missing, and is told what is there.
            source.publish([stored(10)])
            while 10 not in view.hashes:
                source.publish([stored(11)])
                view.poll(10)
            view.until(lambda: view.subscriber._next == source.next_sequence)
            assert view.hashes <= {10, 11}
            assert view.subscriber.counters.gaps >= 1


def test_bad_frames_and_bad_batches_are_counted_and_the_rest_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with publisher() as source:
        view = follow(source)
        with view.subscriber:
            joined(source, view)
            for frames in ([b""], [b"", b"\x00" * 7, b""], [b"", b"", b"", b""], [b"\xff"] * 9):
                source._pub.send_multipart(frames)
            source._ring.append((source._sequence, b"\xc1"))
            source._pub.send_multipart(live_frames(b"", source._sequence, b"\xc1"))
            source._sequence += 1
            good = encode_batch(WireBatch(1.0, [stored(5), AllBlocksCleared(), stored(6)], 0), source.dialect)
            broken = good.replace(b"AllBlocksCleared", b"AllBlocksCleaned")
            source._pub.send_multipart(live_frames(b"", source._sequence, broken))
            source._sequence += 1
            source.publish([stored(7)])
            view.until(lambda: 7 in view.hashes)
            counters = view.subscriber.counters
            assert view.hashes == {5, 6, 7}
            assert (counters.bad_frames, counters.malformed_batches, counters.bad_events) == (4, 1, 1)
            assert {record.args[1] for record in caplog.records if isinstance(record.args, tuple)} >= {
                "bad_frames",
                "malformed_batches",
                "bad_events",
            }
            assert view.subscriber.state == "partial"


def test_only_the_topic_that_was_asked_for_is_heard() -> None:
    with publisher(topic="kv@10.0.0.1:8000@m") as source:
        view = follow(source, topic="kv@10.0.0.1:8000@m")
        with view.subscriber:
            joined(source, view)
            source._pub.send_multipart(live_frames(b"kv@10.0.0.1:8000@m2", 5, b""))
            source.publish([stored(3)])
            view.until(lambda: 3 in view.hashes)
            assert view.subscriber.counters.bad_frames == 1

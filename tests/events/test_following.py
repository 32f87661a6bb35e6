"""A subscriber follows its publisher through gaps, restarts and confusion, and never believes in ghosts."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from events.following import PlainView, removed, stored
from understudy.errors import ConfigError, InvalidArgument, WrongState
from understudy.events.dialects import Dialect, known_dialects
from understudy.events.endpoints import rank_endpoint
from understudy.events.publisher import Publisher
from understudy.events.subscriber import Subscriber
from understudy.events.wire import AllBlocksCleared, WireBatch, encode_batch, live_frames

if TYPE_CHECKING:
    from collections.abc import Iterator

NAMED = sorted({rules.name for rules in known_dialects()})


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="understudy.events")


def publisher(endpoint: str = "tcp://*:0", **options: Any) -> Publisher:
    settings: dict[str, Any] = {"replay": "tcp://*:0", "buffer_steps": 1000}
    return Publisher(endpoint, **(settings | options))


def reachable(endpoint: str | None) -> str:
    assert endpoint is not None
    return endpoint.replace("0.0.0.0", "127.0.0.1")


def follow(source: Publisher, *, replay: bool = True, **options: Any) -> PlainView:
    return PlainView(
        Subscriber(reachable(source.endpoint), replay=reachable(source.replay) if replay else None, **options)
    )


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


def test_a_replay_request_of_another_shape_is_refused() -> None:
    with publisher() as source, zmq.Context() as context:
        source.publish([stored(1)])
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(reachable(source.replay))
            for request in ([b"\x00" * 8], [b"", b"\x00" * 8, b""], [b"", b"\x00" * 7], [b""]):
                dealer.send_multipart(request)
            dealer.send_multipart([b"", b"\x00" * 8])
            assert dealer.poll(5000)
            assert dealer.recv_multipart()[-2] == b"\x00" * 8
            assert source.refused_requests == 4


@pytest.mark.parametrize(
    ("endpoint", "rank", "address"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("inproc://kv", 2, "inproc://kv_dp2"),
        ("inproc://kv", 0, "inproc://kv"),
    ],
)
def test_a_rank_has_an_address_of_its_own(endpoint: str, rank: int, address: str) -> None:
    assert rank_endpoint(endpoint, rank) == address


@pytest.mark.parametrize(
    ("endpoint", "rank", "message"),
    [
        ("tcp://*:65535", 1, "exceeds 65535"),
        ("tcp://host", 0, "tcp://HOST:PORT"),
        ("udp://*:1", 0, "tcp://HOST:PORT"),
        ("tcp://*:1", -1, "rank must be at least 0"),
    ],
)
def test_an_address_that_cannot_be_is_refused(endpoint: str, rank: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rank_endpoint(endpoint, rank)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="buffer_steps"):
        Publisher("tcp://*:0", buffer_steps=0)
    with pytest.raises(ConfigError, match="cannot publish at tcp://no such host"):
        Publisher("tcp://no such host:1")
    with pytest.raises(ConfigError, match="cannot subscribe to nonsense"):
        Subscriber("nonsense")
    source = publisher()
    event = stored(1)
    event.cache_salt = "s"
    with pytest.raises(InvalidArgument, match="has no cache_salt"):
        source.publish([event])
    assert source.next_sequence == 0
    source.close()
    source.close()
    with pytest.raises(WrongState, match="closed"):
        source.publish([])


def test_ranks_of_a_dialect_without_them_share_a_port() -> None:
    first = Publisher("tcp://*:0", dialect="vllm-0.9.0", rank=2)
    assert isinstance(first.dialect, Dialect)
    with first:
        assert first.publish([stored(1, medium=None)]) == 0

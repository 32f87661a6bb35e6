"""Subscribe to a publisher of KV events, for `understudy events tap` and `verify`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

ANSWER_S = 2.0
"""Seconds in which a publisher must accept a connection, without --wait."""


def add_subscription_flags(parser: argparse.ArgumentParser) -> None:
    """Add the subscription flags to a subcommand."""
    parser.add_argument(
        "--replay", metavar="ADDRESS", help="first request the buffered messages from tcp://HOST:PORT"
    )
    parser.add_argument("--topic", metavar="TEXT", help="only messages whose topic starts with TEXT")
    parser.add_argument("--count", type=int, metavar="N", help="stop after N messages")
    parser.add_argument("--seconds", type=float, metavar="S", help="stop after S seconds")
    parser.add_argument(
        "--wait",
        action="store_const",
        const=True,
        help="wait for a publisher that has not started (default: fail if none accepts the connection)",
    )


def reject_flags_for_file(args: argparse.Namespace) -> None:
    """Raise ConfigError for subscription flags given with a recorded file, which is read whole."""
    from understudy.errors import ConfigError

    names = ("replay", "topic", "count", "seconds", "wait")
    if flags := [f"--{name}" for name in names if getattr(args, name) is not None]:
        raise ConfigError(
            f"{', '.join(flags)} {'needs' if len(flags) == 1 else 'need'} a publisher, and {args.source} is a file, "
            f"which is read whole; leave {'it' if len(flags) == 1 else 'them'} out"
        )


def _check_publisher_accepts(endpoint: str) -> None:
    """Raise ConfigError if no process accepts connections at a TCP endpoint: ZMQ would retry without a word."""
    import socket

    from understudy.errors import ConfigError

    if not endpoint.startswith("tcp://"):
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"{endpoint}: {problem}; start the publisher or check the address; --wait keeps trying"
        ) from None


def receive_messages(args: argparse.Namespace, endpoint: str) -> Iterator[list[bytes]]:
    """Yield the frames of messages as they arrive, after those that the replay socket has buffered."""
    import zmq

    from understudy.checks import positive_number, whole_number
    from understudy.errors import ConfigError
    from understudy.events.counters import Counters
    from understudy.events.endpoints import rank_endpoint
    from understudy.events.replay_client import ReplayClient
    from understudy.events.sockets import Sockets
    from understudy.events.wire import MAX_PAYLOAD_BYTES, live_frames, parse_frames

    topic = (args.topic or "").encode()
    if args.seconds is not None:
        positive_number("--seconds", args.seconds)
    if args.count is not None:
        whole_number("--count", args.count, 1)
    rank_endpoint(endpoint, 0)
    if not args.wait:
        _check_publisher_accepts(endpoint)
    deadline = None if args.seconds is None else time.monotonic() + args.seconds
    count = 0
    sockets = Sockets()
    socket = sockets.open(zmq.SUB, hwm=1000)
    client = None
    try:
        socket.setsockopt(zmq.SUBSCRIBE, topic)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot subscribe to {endpoint}: {error}") from error
        replayed = -1
        if args.replay is not None:
            client = ReplayClient(
                sockets.context, args.replay, Counters(), timeout_ms=3000, max_messages=10_000_000
            )
            answer = client.fetch_since(0)
            if answer is None:
                raise ConfigError(
                    f"--replay: {args.replay} did not answer; check the address or leave it out"
                )
            for sequence, payload in answer[: args.count]:
                replayed, count = sequence, count + 1
                yield live_frames(topic, sequence, payload)
        while args.count is None or count < args.count:
            left_ms = 1000 if deadline is None else int((deadline - time.monotonic()) * 1000)
            if deadline is not None and left_ms <= 0:
                return
            if not socket.poll(min(left_ms, 1000)):
                continue
            frames = socket.recv_multipart()
            try:
                _, sequence, _ = parse_frames(frames)
            except ValueError:
                sequence = replayed + 1
            if sequence <= replayed:
                continue  # already received from the replay socket
            replayed, count = -1, count + 1
            yield frames
    finally:
        if client is not None:
            client.close()
        sockets.close()

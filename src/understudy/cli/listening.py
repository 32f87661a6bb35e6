"""Listening to a publisher of KV events, for `understudy events tap` and `verify`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


def add_listening_flags(parser: argparse.ArgumentParser) -> None:
    """Describe them."""
    parser.add_argument(
        "--replay", metavar="ADDRESS", help="ask here first for what is buffered: tcp://HOST:PORT"
    )
    parser.add_argument("--topic", metavar="TEXT", help="only messages whose topic begins so")
    parser.add_argument("--count", type=int, metavar="N", help="stop after N messages")
    parser.add_argument("--seconds", type=float, metavar="S", help="stop after S seconds")


def refuse_for_a_file(args: argparse.Namespace) -> None:
    """What was recorded is read whole: nobody listens. ConfigError names the flags."""
    from understudy.errors import ConfigError

    names = ("replay", "topic", "count", "seconds")
    if said := [f"--{name}" for name in names if getattr(args, name) is not None]:
        raise ConfigError(
            f"{', '.join(said)} {'is' if len(said) == 1 else 'are'} for a publisher that is listened to, and "
            f"{args.source} is a file, which is read whole; leave {'it' if len(said) == 1 else 'them'} out"
        )


def messages(args: argparse.Namespace, endpoint: str) -> Iterator[list[bytes]]:
    """Frames of live messages as they come; first what the replay socket still has."""
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
            raise ConfigError(f"cannot listen to {endpoint}: {error}") from error
        replayed = -1
        if args.replay is not None:
            client = ReplayClient(
                sockets.context, args.replay, Counters(), timeout_ms=3000, max_messages=10_000_000
            )
            answer = client.since(0)
            if answer is None:
                raise ConfigError(f"{args.replay} did not answer a replay request")
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
                continue  # the replay has told it already
            replayed, count = -1, count + 1
            yield frames
    finally:
        if client is not None:
            client.close()
        sockets.close()

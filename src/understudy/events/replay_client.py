"""Requests to a publisher's replay socket for missed messages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

import zmq

from understudy.errors import MalformedBatch
from understudy.events.publisher import DUMP
from understudy.events.wire import MAX_PAYLOAD_BYTES, parse_frames, sequence_bytes

if TYPE_CHECKING:
    from understudy.events.counters import Counters

Messages: TypeAlias = list[tuple[int, bytes]]  # (sequence, payload)


class ReplayClient:
    """Send one request at a time, each with a time limit; discard late answers to older requests."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        counters: Counters,
        *,
        timeout_ms: int,
        max_messages: int,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._counters = counters
        self._timeout_ms = timeout_ms
        self._max_messages = max_messages
        self._socket: zmq.Socket[bytes] | None = None

    def fetch_since(self, sequence: int) -> Messages | None:
        """Fetch buffered messages from `sequence` on, in order; None when the answer is not complete."""
        return self._request(sequence)

    def fetch_dump(self) -> Messages | None:
        """Fetch the publisher's blocks; all messages carry the sequence of the dump. Empty: not supported."""
        return self._request(DUMP)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    def _request(self, sequence: int) -> Messages | None:
        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.set_hwm(self._max_messages)
            self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
            self._socket.connect(self._endpoint)
        deadline = time.monotonic() + self._timeout_ms / 1000
        answer: Messages = []
        self._socket.send_multipart([b"", sequence_bytes(sequence)])
        while len(answer) < self._max_messages:
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0 or not self._socket.poll(left_ms):
                break
            try:
                _, number, payload = parse_frames(self._socket.recv_multipart())
            except MalformedBatch as error:
                self._counters.note("bad_frames", f"replay of {self._endpoint}: {error}")
                continue
            if number == -1:
                return answer
            answer.append((number, payload))
            deadline = max(
                deadline, time.monotonic() + self._timeout_ms / 1000
            )  # more answers are on the way
        self.close()  # discards later answers to this request
        return None

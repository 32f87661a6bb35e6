"""KV events over ZMQ, as vLLM and SGLang publish them: a stream, and a socket that replays recent messages."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Self

import zmq

from understudy.errors import ConfigError, WrongState
from understudy.events.dialects import Dialect, dialect
from understudy.events.endpoints import rank_endpoint, should_bind
from understudy.events.mirror import Mirror
from understudy.events.sockets import Sockets
from understudy.events.translate import to_wire
from understudy.events.wire import WireBatch, encode_batch, live_frames, replay_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from understudy.events.events import PublishedEvent
    from understudy.events.wire import WireEvent

log = logging.getLogger("understudy.events")

# Requested from the replay socket instead of a sequence: a dump of the stored blocks. Engines answer only with END.
DUMP = -2
END = -1
_MORE = int(zmq.SNDMORE)
DUMP_BLOCKS = 1000  # blocks per message of a dump


class Publisher:
    """Publish the events of one worker's rank in the wire format of a release.

    Messages are numbered from 0. With `replay`, readers can request the last `buffer_steps` messages again, or a dump:
    the blocks stored and not removed, as of a sequence number. Publishing never waits for a reader: one that is more
    than `hwm` messages behind misses some, detects the gap and requests them. Call `publish` from one thread at a
    time; call `close`, or use a `with` block.

    An `endpoint` that names one host is connected to, as vLLM does, unless `bind` is set.
    """

    def __init__(
        self,
        endpoint: str = "tcp://*:5557",
        *,
        replay: str | None = None,
        bind: bool = False,
        dialect: str | Dialect = "vllm",
        rank: int = 0,
        topic: str = "",
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if buffer_steps < 1:
            raise ConfigError(f"buffer_steps must be at least 1, got {buffer_steps}")
        if hwm < 1:
            raise ConfigError(f"hwm must be at least 1 message, got {hwm}")
        self.dialect = _resolve_dialect(dialect)
        self.rank = rank
        self.topic = topic.encode()
        self.refused_requests = 0
        self._clock = clock
        self._sequence = 0
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._mirror = Mirror()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sockets = Sockets()
        self._thread: threading.Thread | None = None
        self._wake_pipe: tuple[int, ...] = ()  # read and write end; wakes the thread
        offset = rank if self.dialect.has_rank else 0
        try:
            own = rank_endpoint(endpoint, offset)
            self._pub = self._open(zmq.PUB, own, hwm, bind=bind or should_bind(own))
            self._pub.linger = 200  # ms, in the background
            self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
            self.replay: str | None = None
            if replay is not None:
                replay_endpoint = rank_endpoint(replay, offset)
                router = self._open(zmq.ROUTER, replay_endpoint, max(hwm, buffer_steps + 1), bind=True)
                self.replay = router.getsockopt_string(zmq.LAST_ENDPOINT)
                self._wake_pipe = os.pipe()
                thread = threading.Thread(
                    target=self._serve, args=(router,), name="kv-event-replay", daemon=True
                )
                thread.start()
                self._thread = thread
        except BaseException:
            self._release()
            raise

    def _open(self, kind: int, endpoint: str, hwm: int, *, bind: bool) -> zmq.Socket[bytes]:
        socket = self._sockets.open(kind, hwm)
        try:
            if bind:
                self._sockets.bind(socket, endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            does = "bind" if bind else "publish at"
            raise ConfigError(f"cannot {does} {endpoint}: {error.strerror}") from error
        return socket

    @property
    def next_sequence(self) -> int:
        """Sequence number of the next message."""
        return self._sequence

    def publish(self, events: Sequence[WireEvent], *, ts: float | None = None, lost: bool = False) -> int:
        """Send a batch and return its sequence number.

        InvalidArgument, with nothing sent, when the dialect cannot express an event. A `lost` batch is numbered and
        can be replayed, but is not sent: a simulated fault.
        """
        if self._stop.is_set():
            raise WrongState("the publisher is closed")
        batch = WireBatch(self._clock() if ts is None else ts, list(events), self.rank)
        payload = encode_batch(batch, self.dialect)
        with self._lock:
            sequence = self._sequence
            self._sequence += 1
            if self.replay is not None:  # else no reader can request it
                self._ring.append((sequence, payload))
                self._mirror.apply(events)
            if not lost:
                self._send(live_frames(self.topic, sequence, payload))
        return sequence

    def _send(self, frames: list[bytes]) -> None:
        """Send all frames as one message; `send_multipart` costs three times as much."""
        send = self._pub.send
        for frame in frames[:-1]:
            send(frame, _MORE)
        send(frames[-1])

    def publish_events(
        self,
        events: Iterable[PublishedEvent],
        *,
        block_size: int,
        ts: float | None = None,
        lost: bool = False,
        native_offload: bool = False,
    ) -> int | None:
        """Convert as `to_wire` and publish. Return None, with nothing sent, when the dialect publishes none of them."""
        published = to_wire(events, self.dialect, block_size=block_size, native_offload=native_offload)
        return self.publish(published, ts=ts, lost=lost) if published else None

    def close(self) -> None:
        """Stop and release the addresses. Delivery of sent messages may take a moment longer."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None:
            os.write(self._wake_pipe[1], b"!")
            self._thread.join()
        self._release()

    def _release(self) -> None:
        for number in self._wake_pipe:
            os.close(number)
        self._sockets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the replay socket, on its own thread ---------------------------------------------------------

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        wake = self._wake_pipe[0]
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll())
            if router in ready:
                self._answer(router, router.recv_multipart())
            if wake in ready:
                os.read(wake, 1)

    def _answer(self, router: zmq.Socket[bytes], request: list[bytes]) -> None:
        if len(request) != 3 or request[1] != b"" or len(request[2]) != 8:
            self.refused_requests += 1
            log.warning(
                "replay request of %d frames refused; send an empty frame and a sequence number",
                len(request) - 1,
            )
            return
        start = int.from_bytes(request[2], "big", signed=True)
        messages = self._encode_dump() if start == DUMP else self._copy_buffered(start)
        for sequence, payload in messages:
            frames = replay_frames(self.dialect, self.topic, sequence, payload)
            router.send_multipart([request[0], *frames])
        router.send_multipart([request[0], *replay_frames(self.dialect, self.topic, END, b"")])

    def _copy_buffered(self, start: int) -> list[tuple[int, bytes]]:
        with self._lock:
            if not self._ring or start < 0:
                return []
            return list(islice(self._ring, max(0, start - self._ring[0][0]), None))

    def _encode_dump(self) -> list[tuple[int, bytes]]:
        with self._lock:
            if self._sequence == 0:
                return []
            events = list(self._mirror.dump())
            sequence = self._sequence - 1
        now = self._clock()
        parts = _split(events, DUMP_BLOCKS) if events else iter([[]])
        return [(sequence, encode_batch(WireBatch(now, part, self.rank), self.dialect)) for part in parts]


def _resolve_dialect(given: str | Dialect) -> Dialect:
    return given if isinstance(given, Dialect) else dialect(given)


def _split(events: Sequence[WireEvent], size: int) -> Iterator[list[WireEvent]]:
    for at in range(0, len(events), size):
        yield list(events[at : at + size])

"""KV events over ZMQ, as vLLM and SGLang publish them: a stream, and a socket that plays its last part again."""

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
from understudy.events.endpoints import binds, rank_endpoint
from understudy.events.mirror import Mirror
from understudy.events.sockets import Sockets
from understudy.events.translate import to_wire
from understudy.events.wire import WireBatch, encode_batch, live_frames, replay_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from understudy.events.events import SpokenEvent
    from understudy.events.wire import WireEvent

log = logging.getLogger("understudy.events")

DUMP = (
    -2
)  # asked of the replay socket in place of a sequence: what you hold now, please. Others answer with the end.
END = -1
_MORE = int(zmq.SNDMORE)
DUMP_BLOCKS = 1000  # blocks of one message of a dump


class Publisher:
    """Publishes the events of one worker's rank, in the bytes of a release.

    Messages are numbered from 0. The last `buffer_steps` of them can be asked for again at `replay` (where one is
    given), and so can a dump: what has been stored and not removed, as of a sequence number. Nothing here ever waits
    for a reader: one that falls behind `hwm` messages misses some, finds the gap and asks. `publish` may be called
    from one thread at a time; call `close`, or use it as a context.

    An `endpoint` that names one host is connected to, as vLLM does, unless `bind` says that it is ours to open.
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
        self.dialect = _dialect(dialect)
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
        self._wakes: tuple[int, ...] = ()  # a pipe to it
        offset = rank if self.dialect.has_rank else 0
        try:
            own = rank_endpoint(endpoint, offset)
            self._pub = self._open(zmq.PUB, own, hwm, bind=bind or binds(own))
            self._pub.linger = 200  # ms, in the background
            self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
            self.replay: str | None = None
            if replay is not None:
                asked = rank_endpoint(replay, offset)
                router = self._open(zmq.ROUTER, asked, max(hwm, buffer_steps + 1), bind=True)
                self.replay = router.getsockopt_string(zmq.LAST_ENDPOINT)
                self._wakes = os.pipe()
                thread = threading.Thread(
                    target=self._serve, args=(router,), name="kv-event-replay", daemon=True
                )
                thread.start()
                self._thread = thread
        except BaseException:
            self._let_go()
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
        """The number of the next message."""
        return self._sequence

    def publish(self, events: Sequence[WireEvent], *, ts: float | None = None, lost: bool = False) -> int:
        """Send a batch; its sequence number. InvalidArgument when the dialect cannot say an event: nothing is sent.

        A `lost` batch is numbered and can be asked for again, but never arrives: a fault on purpose.
        """
        if self._stop.is_set():
            raise WrongState("the publisher is closed")
        batch = WireBatch(self._clock() if ts is None else ts, list(events), self.rank)
        payload = encode_batch(batch, self.dialect)
        with self._lock:
            sequence = self._sequence
            self._sequence += 1
            if self.replay is not None:  # else nobody can ask
                self._ring.append((sequence, payload))
                self._mirror.apply(events)
            if not lost:
                self._send(live_frames(self.topic, sequence, payload))
        return sequence

    def _send(self, frames: list[bytes]) -> None:
        """As `send_multipart`, which costs three times as much."""
        send = self._pub.send
        for frame in frames[:-1]:
            send(frame, _MORE)
        send(frames[-1])

    def publish_events(
        self, events: Iterable[SpokenEvent], *, block_size: int, ts: float | None = None, lost: bool = False
    ) -> int | None:
        """As `publish`, in our own words. None, and nothing sent, when such an engine would not speak of them."""
        spoken = [to_wire(event, self.dialect, block_size=block_size) for event in events]
        told = [event for event in spoken if event is not None]
        return self.publish(told, ts=ts, lost=lost) if told else None

    def close(self) -> None:
        """Stop, and let go of the addresses. What was sent may still be on its way for a moment."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None:
            os.write(self._wakes[1], b"!")
            self._thread.join()
        self._let_go()

    def _let_go(self) -> None:
        for number in self._wakes:
            os.close(number)
        self._sockets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- the replay socket, on a thread of its own ----------------------------------------------------

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        woken = self._wakes[0]
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(woken, zmq.POLLIN)
        while not self._stop.is_set():
            ready = dict(poller.poll())
            if router in ready:
                self._answer(router, router.recv_multipart())
            if woken in ready:
                os.read(woken, 1)

    def _answer(self, router: zmq.Socket[bytes], request: list[bytes]) -> None:
        if len(request) != 3 or request[1] != b"" or len(request[2]) != 8:
            self.refused_requests += 1
            log.warning(
                "replay request of %d frames refused: an empty one and a sequence are asked for",
                len(request) - 1,
            )
            return
        start = int.from_bytes(request[2], "big", signed=True)
        messages = self._dumped() if start == DUMP else self._buffered(start)
        for sequence, payload in messages:
            frames = replay_frames(self.dialect, self.topic, sequence, payload)
            router.send_multipart([request[0], *frames])
        router.send_multipart([request[0], *replay_frames(self.dialect, self.topic, END, b"")])

    def _buffered(self, start: int) -> list[tuple[int, bytes]]:
        with self._lock:
            if not self._ring or start < 0:
                return []
            return list(islice(self._ring, max(0, start - self._ring[0][0]), None))

    def _dumped(self) -> list[tuple[int, bytes]]:
        with self._lock:
            if self._sequence == 0:
                return []
            events = list(self._mirror.dump())
            sequence = self._sequence - 1
        now = self._clock()
        parts = _chunks(events, DUMP_BLOCKS) if events else iter([[]])
        return [(sequence, encode_batch(WireBatch(now, part, self.rank), self.dialect)) for part in parts]


def _dialect(given: str | Dialect) -> Dialect:
    return given if isinstance(given, Dialect) else dialect(given)


def _chunks(events: Sequence[WireEvent], size: int) -> Iterator[list[WireEvent]]:
    for at in range(0, len(events), size):
        yield list(events[at : at + size])

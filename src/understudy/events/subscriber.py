"""Following one publisher over ZMQ: every message once and in order, or a fresh start that leaves no ghosts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import zmq
from zmq.utils.monitor import recv_monitor_message

from understudy._core import read_wire
from understudy.errors import ConfigError, MalformedBatch
from understudy.events.columns import EventColumns, cleared
from understudy.events.consolidate import columns_of
from understudy.events.counters import Counters
from understudy.events.replay_client import ReplayClient
from understudy.events.sockets import Sockets
from understudy.events.wire import MAX_PAYLOAD_BYTES, parse_frames

if TYPE_CHECKING:
    from understudy.events.replay_client import Messages

State: TypeAlias = Literal["waiting", "live", "partial", "conflict"]

_CONFLICT_STEPS = 3  # so many steps back among the last messages: two publishers speak
_CONFLICT_WINDOW = 64
_WATCH_S = 0.05  # between two looks at the connection
_NOW = int(zmq.NOBLOCK)


class Update(msgspec.Struct, frozen=True, eq=False):
    """What the publisher said since the last call. Where a view must be built anew, the columns hold a Cleared."""

    columns: EventColumns
    ts: npt.NDArray[np.float64]  # seconds, of every message


class Subscriber:
    """Follows one publisher: a worker's rank.

    `poll` hands out what came, as columns. A gap is filled from the publisher's replay socket. Where its ring has
    wrapped, a dump is asked for: a Cleared, then what the publisher holds now. A publisher that began anew is found by
    a sequence that goes back, by a reconnect, and by a replayed message that differs from the one that was seen; its
    old blocks are cleared first. Without a replay socket, or with one that cannot dump, a gap leads to a Cleared and
    the state `partial`: what is known is true, but some blocks are not known. (So it is after a batch that nobody can
    read, which may also have removed some.)

    `state`: `waiting` for the first message, `live`, `partial`, or `conflict` (two publishers under one name: nothing
    is believed until one is silent). `counters` count, and every trouble has a log line. For one thread.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        topic: str | None = None,
        hwm: int = 100_000,
        timeout_ms: int = 2000,
        max_replayed: int = 1_000_000,
        bind: bool = False,
    ) -> None:
        if hwm < 1:
            raise ConfigError(f"hwm must be at least 1 message, got {hwm}")
        self.endpoint = endpoint
        self.counters = Counters()
        self.state: State = "waiting"
        self.last_message_s: float | None = None  # on time.monotonic
        self._topic = None if topic is None else topic.encode()
        self._next: int | None = None
        self._last_payload: bytes | None = None  # of message _next - 1, where it was seen
        self._last_live = -1
        self._steps_back: list[int] = []  # at which messages
        self._in_order = 0
        self._out: list[EventColumns] = []
        self._ts: list[npt.NDArray[np.float64]] = []
        self._sockets = Sockets()
        try:
            self._sub = self._sockets.open(zmq.SUB, hwm)
            self._sub.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
            self._sub.setsockopt(zmq.RECONNECT_IVL, 100)
            self._sub.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
            self._sub.setsockopt(zmq.TCP_KEEPALIVE, 1)
            self._sub.setsockopt(zmq.SUBSCRIBE, self._topic or b"")
            self._monitor = self._sockets.monitor(
                self._sub, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
            )
            if bind:
                self.endpoint = self._sockets.bind(self._sub, endpoint)
            else:
                self._sub.connect(endpoint)
        except zmq.ZMQError as error:
            self._sockets.close()
            raise ConfigError(f"cannot subscribe to {endpoint}: {error}") from error
        self._client = None
        if replay is not None:
            self._client = ReplayClient(
                self._sockets.context, replay, self.counters, timeout_ms=timeout_ms, max_messages=max_replayed
            )
        self._was_cut = False
        self._watch_at = 0.0

    # --- reading --------------------------------------------------------------------------------------

    def poll(
        self, timeout_ms: int = 100, *, gather_ms: float = 0.0, max_messages: int = 4096
    ) -> Update | None:
        """What came, waiting for it up to `timeout_ms`; None when nothing did. Never more than `max_messages` at once,
        but for what a replay or a dump brings. After the first message, wait `gather_ms` for more: a call costs about
        as much as twenty messages.
        """
        self._watch_connection()
        messages: Messages = []
        if self._sub.poll(timeout_ms):
            self._receive(messages, max_messages)
            if gather_ms and len(messages) < max_messages:
                time.sleep(gather_ms / 1000)
                self._receive(messages, max_messages - len(messages))
        if messages:
            self.last_message_s = time.monotonic()
            self._take(messages)
        if not self._out:
            return None
        update = Update(EventColumns.concatenate(self._out), np.concatenate([*self._ts, _NO_TS]))
        self._out, self._ts = [], []
        return update

    def catch_up(self) -> None:
        """Before anything was heard: ask the replay socket, if there is one, what was said so far.

        A follower that comes late need not wait for the next message; `poll` hands out what it learns.
        """
        if self._next is None and self._client is not None:
            self._start_anew(None, None)

    def close(self) -> None:
        """Stop following."""
        if self._client is not None:
            self._client.close()
        self._sockets.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, messages: Messages, limit: int) -> None:
        receive, topic = self._sub.recv, self._topic
        for _ in range(limit):
            try:
                part = receive(_NOW, copy=False)
            except zmq.Again:
                return
            frames = [part.bytes]
            while part.more:  # as `recv_multipart`, at half its cost
                part = receive(_NOW, copy=False)
                frames.append(part.bytes)
            try:
                said, sequence, payload = parse_frames(frames)
                if topic is not None and said != topic:
                    raise MalformedBatch(f"topic {said!r} is not {topic!r}")
                if len(frames) != 3 or sequence < 0:
                    raise MalformedBatch("not a live message")
            except MalformedBatch as error:
                self.counters.note("bad_frames", f"{self.endpoint}: {error}")
            else:
                messages.append((sequence, payload))

    def _watch_connection(self) -> None:
        """A publisher that was away may be another one, even if it says nothing."""
        now = time.monotonic()
        if now < self._watch_at:
            return
        self._watch_at = now + _WATCH_S
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._was_cut = True
            elif self._was_cut:
                self._was_cut = False
                self._come_back()

    def _come_back(self) -> None:
        """The connection is there again. Who cannot ask whether the publisher is the one that it was starts anew."""
        if self._next is None:
            return
        if self._client is not None:
            self._recover("the connection came back", doubtful=True)
        else:
            self._doubt()

    def _doubt(self) -> None:
        self.counters.note(
            "partial_views",
            f"{self.endpoint}: the connection came back, and nobody can tell what was said meanwhile",
        )
        self._clear()
        self._next, self._last_payload, self._last_live, self.state = None, None, -1, "partial"

    # --- sequence -------------------------------------------------------------------------------------

    def _take(self, messages: Messages) -> None:
        run: list[bytes] = []
        for sequence, payload in messages:
            self.counters.messages += 1
            if sequence == self._next and self.state != "conflict":
                run.append(payload)
                self._next += 1
                self._last_payload, self._last_live = payload, sequence
                continue
            self._apply(run)
            run = []
            self._meet(sequence, payload)
        self._apply(run)

    def _meet(self, sequence: int, payload: bytes) -> None:
        """A message that is not the next one."""
        back = sequence <= self._last_live
        self._in_order = 0 if back else self._in_order + 1
        last_live, self._last_live = self._last_live, sequence
        if back and self._next is not None and self._is_conflict():
            return
        if self.state == "conflict":
            if self._in_order < _CONFLICT_WINDOW:
                return
            self._start_anew(sequence, payload)
        elif self._next is None:
            if sequence == 0 or self._client is None:
                self._begin(sequence, payload, "live" if sequence == 0 else "partial")
            else:
                self._start_anew(sequence, payload)
        elif back and sequence == last_live and sequence == self._next - 1 and payload == self._last_payload:
            self.counters.note("duplicates", f"{self.endpoint}: message {sequence} came twice")
        elif back:
            self.counters.note(
                "restarts", f"{self.endpoint}: went from message {last_live} back to {sequence}"
            )
            self._start_anew(sequence, payload)
        elif sequence < self._next:
            self.counters.duplicates += 1  # a replay has told it already
        else:
            missing = sequence - self._next
            self.counters.note("gaps", f"{self.endpoint}: {missing} messages before {sequence} are missing")
            self._recover(f"message {sequence} came")
            if self._next == sequence:  # the replay ended in front of it
                self._begin(sequence, payload, self.state)
            elif self._next < sequence:
                self._give_up(sequence, payload, "the replay ends before it")

    def _is_conflict(self) -> bool:
        now = self.counters.messages
        self._steps_back = [at for at in self._steps_back if now - at < _CONFLICT_WINDOW] + [now]
        if len(self._steps_back) < _CONFLICT_STEPS:
            return False
        if self.state != "conflict":
            self.counters.note("conflicts", f"{self.endpoint}: two publishers speak under one name")
            self._clear()
            self.state = "conflict"
        return True

    # --- recovery -------------------------------------------------------------------------------------

    def _recover(self, why: str, *, doubtful: bool = False) -> None:
        """Fill up from the last message on, which must come back as it was: else another publisher says it.

        `doubtful`: it may be another one, so that a last message that does not come back proves nothing.
        """
        assert self._next is not None
        if self._client is None:
            return
        start = max(0, self._next - 1)
        answer = self._client.since(start)
        if answer is None:
            return
        first = answer[0] if answer else None
        known = self._last_payload
        if first is None or (
            first[0] == start and self._next > 0 and known is not None and first[1] != known
        ):
            self.counters.note(
                "restarts", f"{self.endpoint}: {why}, and the publisher is not the one that it was"
            )
            self._start_anew(None, None)
        elif doubtful and (known is None or first[0] != start):
            if not self._resync():
                self._doubt()
        elif first[0] > self._next:
            self._resync()
        else:
            self._apply_replayed([(number, data) for number, data in answer if number >= self._next])

    def _start_anew(self, sequence: int | None, payload: bytes | None) -> None:
        """Forget everything and learn what the publisher holds; `payload` is what was heard of it."""
        self._clear()
        self._steps_back = self._steps_back[-_CONFLICT_STEPS:]
        self._next, self._last_payload, self.state = 0, None, "live"
        answer = self._client.since(0) if self._client is not None else None
        if answer and answer[0][0] > 0:
            self._resync()
        elif answer:
            self._apply_replayed(answer)
        if sequence is None or payload is None:
            if answer is None:
                self._next, self.state = None, "waiting"
        elif self._next == sequence:
            self._begin(sequence, payload, self.state)
        elif self._next < sequence:
            self._give_up(sequence, payload, "nobody can tell what was before")

    def _resync(self) -> bool:
        """The ring has wrapped: what the publisher holds now stands for what it said. False: it cannot tell."""
        assert self._client is not None
        dumped = self._client.dump()
        if not dumped:
            return False  # the caller finds that the gap is still there
        self._clear()
        self.counters.dumped_messages += len(dumped)
        self._next, self._last_payload, self.state = dumped[-1][0] + 1, None, "live"
        self._apply([payload for _, payload in dumped])
        since = self._client.since(self._next)
        self._apply_replayed([each for each in since or [] if each[0] >= self._next])
        return True

    def _apply_replayed(self, messages: Messages) -> None:
        run: list[bytes] = []
        for number, payload in messages:
            if number != self._next:
                break  # a hole in a replay: the next live message finds it
            run.append(payload)
            self._next, self._last_payload = number + 1, payload
        self.counters.replayed_messages += len(run)
        self._apply(run)

    def _give_up(self, sequence: int, payload: bytes, reason: str) -> None:
        """What was missed is lost: what is known from here on is true, but not all."""
        self.counters.note("partial_views", f"{self.endpoint}: messages before {sequence} are lost, {reason}")
        self._clear()
        self._begin(sequence, payload, "partial")

    def _begin(self, sequence: int, payload: bytes, state: State) -> None:
        self._next, self._last_payload, self.state = sequence + 1, payload, state
        self._apply([payload])

    # --- handing out ----------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._out.append(cleared())

    def _apply(self, payloads: list[bytes]) -> None:
        if not payloads:
            return
        read = read_wire(payloads)
        counters = self.counters
        if read.malformed:
            counters.note(
                "malformed_batches", f"{self.endpoint}: no batch of events", times=len(read.malformed)
            )
            if self.state == "live":
                self.state = "partial"  # nobody knows what it said
        if read.bad_events:
            counters.note("bad_events", f"{self.endpoint}: events that cannot be read", times=read.bad_events)
        counters.ignored_events += read.ignored_events
        columns = columns_of(read)
        counters.events += len(columns)
        counters.blocks += columns.num_blocks
        self._out.append(columns)
        self._ts.append(read.ts)


_NO_TS = np.zeros(0, np.float64)

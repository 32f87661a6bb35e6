"""Follow one publisher over ZMQ: every message once and in order, or a restart that clears stale blocks."""

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
from understudy.events.columns import EventColumns, build_cleared
from understudy.events.consolidate import to_event_columns
from understudy.events.counters import Counters
from understudy.events.replay_client import ReplayClient
from understudy.events.sockets import Sockets
from understudy.events.wire import MAX_PAYLOAD_BYTES, parse_frames

if TYPE_CHECKING:
    from understudy.events.group_reader import GroupReader, LearningReader
    from understudy.events.replay_client import Messages

State: TypeAlias = Literal["waiting", "live", "partial", "conflict"]

_CONFLICT_STEPS = 3  # so many decreases of the sequence among the last messages: two publishers are active
_CONFLICT_WINDOW = 64
_WATCH_S = 0.05  # between two checks of the connection
_NOW = int(zmq.NOBLOCK)


class Update(msgspec.Struct, frozen=True, eq=False):
    """Events since the last call. A Cleared in the columns means that a view must be rebuilt from there."""

    columns: EventColumns
    ts: npt.NDArray[np.float64]  # seconds, one per message


class Subscriber:
    """Follow one publisher: a worker's rank.

    `poll` returns received events as columns. A gap is filled from the publisher's replay socket. Where its ring has
    wrapped, a dump is requested: a Cleared, then the publisher's current blocks. A restart of the publisher is detected
    by a sequence that decreases, by a reconnect, and by a replayed message that differs from the one received before;
    its old blocks are cleared first. Without a replay socket, or with one that cannot dump, a gap leads to a Cleared
    and the state `partial`: known blocks are right, but some blocks are unknown. (So it is after an unreadable batch,
    which may also have removed some.)

    `state`: `waiting` for the first message, `live`, `partial`, or `conflict` (two publishers with one name: events are
    ignored until one stops). `counters` count messages and faults; faults are logged. For one thread.
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
        reader: GroupReader | LearningReader | None = None,
    ) -> None:
        """Connect. `reader` reads messages of several KV cache groups; None: blocks of the first group only."""
        if hwm < 1:
            raise ConfigError(f"hwm must be at least 1 message, got {hwm}")
        self.endpoint = endpoint
        self.counters = Counters()
        self.state: State = "waiting"
        self.last_message_s: float | None = None  # on time.monotonic
        self._topic = None if topic is None else topic.encode()
        self._next: int | None = None
        self._last_payload: bytes | None = None  # of message _next - 1, where it was received
        self._last_live = -1
        self._steps_back: list[int] = []  # message counts at which the sequence decreased
        self._in_order = 0
        self._reader = reader
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
        self._was_disconnected = False
        self._next_check_s = 0.0

    # --- reading --------------------------------------------------------------------------------------

    def poll(
        self, timeout_ms: int = 100, *, gather_ms: float = 0.0, max_messages: int = 4096
    ) -> Update | None:
        """Return received events, waiting up to `timeout_ms` for the first; None when there are none.

        Returns at most `max_messages` messages, plus those of a replay or a dump. After the first message, it waits
        `gather_ms` for more: a call costs about as much as twenty messages.
        """
        self._check_connection()
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

    def request_history(self) -> None:
        """Request earlier messages from the replay socket, if there is one and no message was received yet.

        A late subscriber then need not wait for the next message; `poll` returns the events.
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
            while part.more:  # `recv_multipart` costs twice as much
                part = receive(_NOW, copy=False)
                frames.append(part.bytes)
            try:
                received_topic, sequence, payload = parse_frames(frames)
                if topic is not None and received_topic != topic:
                    raise MalformedBatch(f"topic {received_topic!r} is not {topic!r}")
                if len(frames) != 3 or sequence < 0:
                    raise MalformedBatch("not a live message")
            except MalformedBatch as error:
                self.counters.note("bad_frames", f"{self.endpoint}: {error}")
            else:
                messages.append((sequence, payload))

    def _check_connection(self) -> None:
        """Recover after a reconnect: the publisher may have restarted, even if it sends nothing."""
        now = time.monotonic()
        if now < self._next_check_s:
            return
        self._next_check_s = now + _WATCH_S
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._was_disconnected = True
            elif self._was_disconnected:
                self._was_disconnected = False
                self._on_reconnect()

    def _on_reconnect(self) -> None:
        """Replay missed messages; without a replay socket, discard the known blocks."""
        if self._next is None:
            return
        if self._client is not None:
            self._recover("reconnected", may_have_restarted=True)
        else:
            self._discard_view()

    def _discard_view(self) -> None:
        self.counters.note(
            "partial_views",
            f"{self.endpoint}: reconnected, and messages in between cannot be replayed",
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
            self._handle_unexpected(sequence, payload)
        self._apply(run)

    def _handle_unexpected(self, sequence: int, payload: bytes) -> None:
        """Handle a message that is not the next one: a start, gap, duplicate, restart or conflict."""
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
            self.counters.note("duplicates", f"{self.endpoint}: message {sequence} was received twice")
        elif back:
            self.counters.note(
                "restarts", f"{self.endpoint}: went from message {last_live} back to {sequence}"
            )
            self._start_anew(sequence, payload)
        elif sequence < self._next:
            self.counters.duplicates += 1  # a replay contained it
        else:
            missing = sequence - self._next
            self.counters.note("gaps", f"{self.endpoint}: {missing} messages before {sequence} are missing")
            self._recover(f"message {sequence} was received")
            if self._next == sequence:  # the replay ended just before it
                self._begin(sequence, payload, self.state)
            elif self._next < sequence:
                self._give_up(sequence, payload, "the replay ends before it")

    def _is_conflict(self) -> bool:
        now = self.counters.messages
        self._steps_back = [at for at in self._steps_back if now - at < _CONFLICT_WINDOW] + [now]
        if len(self._steps_back) < _CONFLICT_STEPS:
            return False
        if self.state != "conflict":
            self.counters.note("conflicts", f"{self.endpoint}: two publishers use one name")
            self._clear()
            self.state = "conflict"
        return True

    # --- recovery -------------------------------------------------------------------------------------

    def _recover(self, why: str, *, may_have_restarted: bool = False) -> None:
        """Replay from the last message on, which must be equal to the received one: else the publisher restarted.

        With `may_have_restarted`, a replay without that last message is not proof of the same publisher.
        """
        assert self._next is not None
        if self._client is None:
            return
        start = max(0, self._next - 1)
        answer = self._client.fetch_since(start)
        if answer is None:
            return
        first = answer[0] if answer else None
        known = self._last_payload
        if first is None or (
            first[0] == start and self._next > 0 and known is not None and first[1] != known
        ):
            self.counters.note("restarts", f"{self.endpoint}: {why}, and the publisher has restarted")
            self._start_anew(None, None)
        elif may_have_restarted and (known is None or first[0] != start):
            if not self._resync():
                self._discard_view()
        elif first[0] > self._next:
            self._resync()
        else:
            self._apply_replayed([(number, data) for number, data in answer if number >= self._next])

    def _start_anew(self, sequence: int | None, payload: bytes | None) -> None:
        """Clear all blocks and request the publisher's history; `payload` is its newest received message."""
        self._clear()
        self._steps_back = self._steps_back[-_CONFLICT_STEPS:]
        self._next, self._last_payload, self.state = 0, None, "live"
        answer = self._client.fetch_since(0) if self._client is not None else None
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
            self._give_up(sequence, payload, "and cannot be replayed")

    def _resync(self) -> bool:
        """Replace all blocks by a dump, after the ring has wrapped. Return False when dumps are not supported."""
        assert self._client is not None
        dumped = self._client.fetch_dump()
        if not dumped:
            return False  # the caller handles the remaining gap
        self._clear()
        self.counters.dumped_messages += len(dumped)
        self._next, self._last_payload, self.state = dumped[-1][0] + 1, None, "live"
        self._apply([payload for _, payload in dumped])
        since = self._client.fetch_since(self._next)
        self._apply_replayed([each for each in since or [] if each[0] >= self._next])
        return True

    def _apply_replayed(self, messages: Messages) -> None:
        run: list[bytes] = []
        for number, payload in messages:
            if number != self._next:
                break  # a gap in a replay: the next live message detects it
            run.append(payload)
            self._next, self._last_payload = number + 1, payload
        self.counters.replayed_messages += len(run)
        self._apply(run)

    def _give_up(self, sequence: int, payload: bytes, reason: str) -> None:
        """Accept the loss of earlier messages and continue in state `partial`."""
        self.counters.note("partial_views", f"{self.endpoint}: messages before {sequence} are lost, {reason}")
        self._clear()
        self._begin(sequence, payload, "partial")

    def _begin(self, sequence: int, payload: bytes, state: State) -> None:
        self._next, self._last_payload, self.state = sequence + 1, payload, state
        self._apply([payload])

    # --- output ---------------------------------------------------------------------------------------

    def _clear(self) -> None:
        if self._reader is not None:
            self._reader.clear()
        self._out.append(build_cleared())

    def _apply(self, payloads: list[bytes]) -> None:
        if not payloads:
            return
        read = read_wire(payloads) if self._reader is None else self._reader.read(payloads)
        counters = self.counters
        if read.malformed:
            counters.note(
                "malformed_batches", f"{self.endpoint}: not a batch of events", times=len(read.malformed)
            )
            if self.state == "live":
                self.state = "partial"  # its changes are unknown
        if read.bad_events:
            counters.note("bad_events", f"{self.endpoint}: unreadable events", times=read.bad_events)
        counters.ignored_events += read.ignored_events
        columns = to_event_columns(read)
        counters.events += len(columns)
        counters.blocks += columns.num_blocks
        self._out.append(columns)
        self._ts.append(read.ts)


_NO_TS = np.zeros(0, np.float64)

"""KV events through NATS JetStream, for fleets on several machines; needs the extra `nats`.

Every publisher has a subject, `kv.events.WORKER.RANK`. Payloads are those of ZMQ. Each message carries a sequence
number and the publisher's epoch, which changes at a restart. The server keeps the last `keep` messages per subject for
late subscribers.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from understudy._core import read_wire
from understudy.errors import ConfigError
from understudy.events.columns import EventColumns, build_cleared
from understudy.events.consolidate import to_event_columns
from understudy.events.counters import Counters
from understudy.events.dialects import Dialect, dialect
from understudy.events.subscriber import Update
from understudy.events.translate import to_wire
from understudy.events.wire import WireBatch, encode_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from understudy.events.events import PublishedEvent
    from understudy.events.subscriber import State
    from understudy.events.wire import WireEvent

STREAM = "KV_EVENTS"
SEQUENCE, EPOCH = "Kv-Sequence", "Kv-Epoch"


def build_subject(worker: int | str, rank: int = 0) -> str:
    """Build the subject of a worker's rank. ConfigError when its name cannot be part of a subject."""
    name = str(worker)
    if not name or any(mark in name for mark in " .*>\t\r\n"):
        raise ConfigError(f"worker: {name!r} cannot be part of a subject; use no spaces, dots, * or >")
    return f"kv.events.{name}.{rank}"


async def connect(servers: str | list[str]) -> Any:
    """Connect to NATS. ConfigError when that fails, or without the extra `nats`."""
    try:
        import nats
        import nats.errors
    except ImportError as error:
        raise ConfigError("nats: the client is not installed; pip install 'understudy[nats]'") from error
    try:
        return await nats.connect(
            servers, connect_timeout=5, max_reconnect_attempts=5, reconnect_time_wait=0.1
        )
    except (OSError, nats.errors.Error) as error:
        raise ConfigError(f"cannot connect to NATS at {servers}: {error}") from error


class JetStreamPublisher:
    """Publish the events of one worker's rank. Create it with `open`; `close` when done."""

    def __init__(self, client: Any, worker: int | str, rank: int, rules: Dialect) -> None:
        self.dialect = rules
        self.rank = rank
        self.next_sequence = 0
        self._client = client
        self._stream = client.jetstream()
        self._subject = build_subject(worker, rank)
        self._epoch = os.urandom(8).hex()

    @classmethod
    async def open(
        cls,
        servers: str | list[str],
        worker: int | str,
        *,
        rank: int = 0,
        dialect: str | Dialect = "vllm",
        keep: int = 10_000,
    ) -> Self:
        """Connect and create the stream. ConfigError when that fails."""
        from nats.js.api import DiscardPolicy
        from nats.js.errors import BadRequestError

        made = cls(await connect(servers), worker, rank, _resolve_dialect(dialect))
        try:
            await made._stream.add_stream(
                name=STREAM, subjects=["kv.events.>"], max_msgs_per_subject=keep, discard=DiscardPolicy.OLD
            )
        except BadRequestError as error:
            await made.close()
            raise ConfigError(f"NATS has a stream {STREAM} with other settings: {error}") from error
        return made

    async def publish(self, events: Sequence[WireEvent], *, ts: float | None = None) -> int:
        """Send a batch, wait for the server's acknowledgement, and return its sequence number."""
        batch = WireBatch(time.time() if ts is None else ts, list(events), self.rank)
        payload = encode_batch(batch, self.dialect)
        sequence = self.next_sequence
        headers = {SEQUENCE: str(sequence), EPOCH: self._epoch}
        await self._stream.publish(self._subject, payload, headers=headers)
        self.next_sequence += 1
        return sequence

    async def publish_events(self, events: Iterable[PublishedEvent], *, block_size: int) -> int | None:
        """Convert and publish events. Return None, with nothing sent, when the dialect publishes none of them."""
        published = to_wire(events, self.dialect, block_size=block_size)
        return await self.publish(published) if published else None

    async def close(self) -> None:
        """Flush pending messages and disconnect."""
        await self._client.drain()


class JetStreamSubscriber:
    """Follow one worker's rank from the oldest message that the server keeps. Create it with `open`.

    The server delivers in order and fills gaps itself. Messages that it dropped are lost: a Cleared, and state
    `partial`. A new epoch means that the worker restarted: a Cleared.
    """

    def __init__(self, client: Any, subject: str) -> None:
        self.subject = subject
        self.counters = Counters()
        self.state: State = "waiting"
        self._client = client
        self._messages: Any = None
        self._epoch: str | None = None
        self._next = 0

    @classmethod
    async def open(cls, servers: str | list[str], worker: int | str, *, rank: int = 0) -> Self:
        """Connect and subscribe. ConfigError when that fails."""
        from nats.js.errors import NotFoundError

        made = cls(await connect(servers), build_subject(worker, rank))
        try:
            made._messages = await made._client.jetstream().subscribe(made.subject, ordered_consumer=True)
        except NotFoundError as error:
            await made.close()
            raise ConfigError(f"NATS has no stream for {made.subject}; start its publisher first") from error
        return made

    async def poll(self, timeout_ms: int = 100, *, max_messages: int = 4096) -> Update | None:
        """Return received events, waiting up to `timeout_ms` for the first; None when there are none."""
        import nats.errors

        parts: list[EventColumns] = []
        stamps = [np.zeros(0)]
        run: list[bytes] = []
        timeout = timeout_ms / 1000
        for _ in range(max_messages):
            try:
                message = await self._messages.next_msg(timeout=timeout)
            except nats.errors.TimeoutError:
                break
            timeout = 0.001  # only messages that are already here
            if self._check_headers(message.headers or {}):
                self._read(run, parts, stamps)
                run = []
                parts.append(build_cleared())
            run.append(message.data)
        self._read(run, parts, stamps)
        return Update(EventColumns.concatenate(parts), np.concatenate(stamps)) if parts else None

    async def close(self) -> None:
        """Stop following."""
        await self._client.close()

    def _check_headers(self, headers: dict[str, str]) -> bool:
        """Record a message's epoch and sequence; return whether earlier events become invalid."""
        self.counters.messages += 1
        text, epoch = headers.get(SEQUENCE, ""), headers.get(EPOCH)
        sequence = int(text) if text.isdecimal() else self._next
        if not text.isdecimal() or epoch is None:
            self.counters.note(
                "bad_frames", f"{self.subject}: a message without a sequence number or an epoch"
            )
        fresh = epoch != self._epoch
        if fresh and self._epoch is not None:
            self.counters.note("restarts", f"{self.subject}: the publisher restarted")
        void = (fresh and self._epoch is not None) or sequence != (0 if fresh else self._next)
        if sequence != (0 if fresh else self._next):
            self.counters.note("partial_views", f"{self.subject}: messages before {sequence} are lost")
            self.state = "partial"
        elif fresh:
            self.state = "live"
        self._epoch, self._next = epoch, sequence + 1
        return void

    def _read(self, payloads: list[bytes], parts: list[EventColumns], stamps: list[Any]) -> None:
        if not payloads:
            return
        read = read_wire(payloads)
        if read.malformed:
            self.counters.note(
                "malformed_batches", f"{self.subject}: not a batch of events", times=len(read.malformed)
            )
        if read.bad_events:
            self.counters.note("bad_events", f"{self.subject}: unreadable events", times=read.bad_events)
        self.counters.ignored_events += read.ignored_events
        parts.append(to_event_columns(read))
        stamps.append(read.ts)
        self.counters.events += len(parts[-1])
        self.counters.blocks += parts[-1].num_blocks


def _resolve_dialect(given: str | Dialect) -> Dialect:
    return given if isinstance(given, Dialect) else dialect(given)

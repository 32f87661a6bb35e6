"""KV events through NATS JetStream, for fleets past one machine: the same payloads, kept by the server (`[nats]`).

Every publisher has a subject, `kv.events.WORKER.RANK`. Its messages bear a sequence number and its epoch, which is
another one after a restart; the server keeps the last `keep` of them for those who come late.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from understudy._core import read_wire
from understudy.errors import ConfigError
from understudy.events.columns import EventColumns, cleared
from understudy.events.consolidate import columns_of
from understudy.events.counters import Counters
from understudy.events.dialects import Dialect, dialect
from understudy.events.subscriber import Update
from understudy.events.translate import to_wire
from understudy.events.wire import WireBatch, encode_batch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from understudy.events.events import SpokenEvent
    from understudy.events.subscriber import State
    from understudy.events.wire import WireEvent

STREAM = "KV_EVENTS"
SEQUENCE, EPOCH = "Kv-Sequence", "Kv-Epoch"


def subject_of(worker: int | str, rank: int = 0) -> str:
    """Where a worker's rank publishes. ConfigError when its name cannot be part of a subject."""
    name = str(worker)
    if not name or any(mark in name for mark in " .*>\t\r\n"):
        raise ConfigError(f"worker {name!r} cannot be part of a subject: no spaces, dots, * or >")
    return f"kv.events.{name}.{rank}"


async def connect(servers: str | list[str]) -> Any:
    """A connection to NATS. ConfigError when there is none, or without the extra `nats`."""
    try:
        import nats
        import nats.errors
    except ImportError as error:
        raise ConfigError("NATS needs its client: pip install 'understudy[nats]'") from error
    try:
        return await nats.connect(
            servers, connect_timeout=5, max_reconnect_attempts=5, reconnect_time_wait=0.1
        )
    except (OSError, nats.errors.Error) as error:
        raise ConfigError(f"cannot connect to NATS at {servers}: {error}") from error


class JetStreamPublisher:
    """Publishes one worker's rank. Make it with `open`; `close` when done."""

    def __init__(self, client: Any, worker: int | str, rank: int, rules: Dialect) -> None:
        self.dialect = rules
        self.rank = rank
        self.next_sequence = 0
        self._client = client
        self._stream = client.jetstream()
        self._subject = subject_of(worker, rank)
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
        """Connect, and see to the stream. ConfigError when that is not possible."""
        from nats.js.api import DiscardPolicy
        from nats.js.errors import BadRequestError

        made = cls(await connect(servers), worker, rank, _rules(dialect))
        try:
            await made._stream.add_stream(
                name=STREAM, subjects=["kv.events.>"], max_msgs_per_subject=keep, discard=DiscardPolicy.OLD
            )
        except BadRequestError as error:
            await made.close()
            raise ConfigError(f"NATS has a stream {STREAM} with other settings: {error}") from error
        return made

    async def publish(self, events: Sequence[WireEvent], *, ts: float | None = None) -> int:
        """Send a batch, and wait until the server has it; its sequence number."""
        batch = WireBatch(time.time() if ts is None else ts, list(events), self.rank)
        payload = encode_batch(batch, self.dialect)
        sequence = self.next_sequence
        headers = {SEQUENCE: str(sequence), EPOCH: self._epoch}
        await self._stream.publish(self._subject, payload, headers=headers)
        self.next_sequence += 1
        return sequence

    async def publish_events(self, events: Iterable[SpokenEvent], *, block_size: int) -> int | None:
        """As `publish`, in our own words. None, and nothing sent, when such an engine would not speak of them."""
        spoken = [to_wire(event, self.dialect, block_size=block_size) for event in events]
        told = [event for event in spoken if event is not None]
        return await self.publish(told) if told else None

    async def close(self) -> None:
        """Hand over what is on its way, and disconnect."""
        await self._client.drain()


class JetStreamSubscriber:
    """Follows one worker's rank from the oldest message that the server keeps. Make it with `open`.

    The server delivers in order and fills gaps itself. What it has dropped is lost: a Cleared, and state `partial`.
    Another epoch is another life of the worker: a Cleared.
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
        """Connect and subscribe. ConfigError when that is not possible."""
        from nats.js.errors import NotFoundError

        made = cls(await connect(servers), subject_of(worker, rank))
        try:
            made._messages = await made._client.jetstream().subscribe(made.subject, ordered_consumer=True)
        except NotFoundError as error:
            await made.close()
            raise ConfigError(f"NATS has no stream for {made.subject}: is there a publisher?") from error
        return made

    async def poll(self, timeout_ms: int = 100, *, max_messages: int = 4096) -> Update | None:
        """What came, waiting for it up to `timeout_ms`; None when nothing did."""
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
            timeout = 0.001  # what has come already
            if self._meet(message.headers or {}):
                self._read(run, parts, stamps)
                run = []
                parts.append(cleared())
            run.append(message.data)
        self._read(run, parts, stamps)
        return Update(EventColumns.concatenate(parts), np.concatenate(stamps)) if parts else None

    async def close(self) -> None:
        """Stop following."""
        await self._client.close()

    def _meet(self, headers: dict[str, str]) -> bool:
        """Note a message's place; whether what was known is void before it."""
        self.counters.messages += 1
        text, epoch = headers.get(SEQUENCE, ""), headers.get(EPOCH)
        sequence = int(text) if text.isdecimal() else self._next
        if not text.isdecimal() or epoch is None:
            self.counters.note("bad_frames", f"{self.subject}: a message without a number or an epoch")
        fresh = epoch != self._epoch
        if fresh and self._epoch is not None:
            self.counters.note("restarts", f"{self.subject}: the publisher began anew")
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
                "malformed_batches", f"{self.subject}: no batch of events", times=len(read.malformed)
            )
        if read.bad_events:
            self.counters.note(
                "bad_events", f"{self.subject}: events that cannot be read", times=read.bad_events
            )
        self.counters.ignored_events += read.ignored_events
        parts.append(columns_of(read))
        stamps.append(read.ts)
        self.counters.events += len(parts[-1])
        self.counters.blocks += parts[-1].num_blocks


def _rules(given: str | Dialect) -> Dialect:
    return given if isinstance(given, Dialect) else dialect(given)

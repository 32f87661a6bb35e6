"""A router's view of one engine's cache: its events, and how complete they are."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from understudy.events import Consolidator
from understudy.events.group_reader import GroupReader, LearningReader
from understudy.events.subscriber import Subscriber

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from understudy.events.columns import EventColumns
    from understudy.events.group_reader import GroupLabel

log = logging.getLogger("understudy.router")

Health: TypeAlias = Literal["live", "waiting", "partial", "silent", "conflict", "none", "not_followed"]

MEANING: dict[Health, str] = {
    "live": "all events were received",
    "waiting": "no event was received yet",
    "partial": "events were lost and cannot be replayed: the view is correct but incomplete",
    "silent": "it answers requests but publishes no events for them",
    "conflict": "two publishers use its name: the events of both are ignored",
    "none": "it publishes no events",
    "not_followed": "this routing reads no events",
}
ASSUMED = "requests sent to it count as cached there for a while, in addition to its events"

GROUPS_REMEDY = "only the first KV cache group is indexed, give --kv-cache-groups"


class EventSource(msgspec.Struct, frozen=True):
    """Endpoints at which a rank of an engine publishes."""

    endpoint: str
    replay: str | None = None
    topic: str | None = None


class Follower:
    """Receives one rank's events in a thread and passes them to the router's event loop."""

    def __init__(
        self,
        source: EventSource | Health,
        apply: Callable[[EventColumns], None],
        loop: asyncio.AbstractEventLoop,
        *,
        silence_s: float = 5.0,
        reader: GroupReader | LearningReader | None = None,
        on_groups: Callable[[list[GroupLabel]], None] | None = None,
    ) -> None:
        """Start following a source; without one, the view keeps the given state.

        `reader` reads several KV cache groups; `on_groups` receives those that it learns.
        `on_groups` is called in the loop, before the first blocks of these groups are applied.
        """
        self.source = source if isinstance(source, EventSource) else None
        self._reader = reader
        self._on_groups = on_groups
        self._reported: Health = "waiting" if isinstance(source, EventSource) else source
        self.health: Health = self._reported
        self.changes = 0
        """Number of health changes."""
        self.counters: dict[str, int] = {}
        self._silence_s = silence_s
        self._expected_since_s: float | None = None
        self._received_s = 0.0
        self._apply = apply
        self._loop = loop
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if isinstance(source, EventSource):
            subscriber = Subscriber(
                source.endpoint, replay=source.replay, topic=source.topic or None, reader=reader
            )
            self._thread = threading.Thread(target=self._follow, args=(subscriber,), daemon=True)
            self._thread.start()

    # ── The loop's side ──

    def expect(self, sent_s: float) -> None:
        """Expect events for new blocks of an answered request, sent at `sent_s` (`time.monotonic`)."""
        if self._expected_since_s is None and self._received_s < sent_s:
            self._expected_since_s = time.monotonic()

    def look(self) -> Health:
        """Update and return the health of the view."""
        since = self._expected_since_s
        if since is not None and self._received_s >= since:
            self._expected_since_s = since = None
        state = self._reported
        if state == "live" and since is not None and time.monotonic() - since > self._silence_s:
            state = "silent"
        if state != self.health:
            self.health = state
            self.changes += 1
        return state

    @property
    def degraded(self) -> bool:
        """True when events may be missing."""
        return self.health not in ("live", "not_followed")

    def describe(self) -> dict[str, Any]:
        """Describe the view for `/dump`."""
        described: dict[str, Any] = {"state": self.health, "meaning": MEANING[self.health]}
        if self.degraded:
            described["meanwhile"] = ASSUMED
        if self.source is not None:
            described |= {"endpoint": self.source.endpoint, "replay": self.source.replay, **self.counters}
        return described

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)

    # ── The thread's side ──

    def _follow(self, subscriber: Subscriber) -> None:
        by_content, by_key = Consolidator(by_content=True), Consolidator()
        reader = self._reader
        seen: Any = None
        labels: list[GroupLabel] = []
        with subscriber:
            subscriber.request_history()
            while not self._stop.is_set():
                update = subscriber.poll(100, gather_ms=1.0)
                counters = msgspec.structs.asdict(subscriber.counters)
                if update is None and (subscriber.state, counters) == seen:
                    continue
                has_keys = isinstance(reader, GroupReader) or (reader is not None and bool(reader.labels))
                truth = by_key if has_keys else by_content
                columns = None if update is None else truth.apply(update.columns)
                seen = (subscriber.state, counters)
                unnamed = truth.distance.unnamed + (reader.unnamed if reader is not None else 0)
                shown = {**counters, "unnamed_blocks": unnamed}
                try:
                    if isinstance(reader, LearningReader):
                        if reader.labels and not labels and self._on_groups is not None:
                            self._loop.call_soon_threadsafe(self._on_groups, reader.labels)
                        labels = reader.labels
                        if reader.problem:
                            log.warning("%s: %s; %s", subscriber.endpoint, reader.problem, GROUPS_REMEDY)
                            reader.problem = ""
                    self._loop.call_soon_threadsafe(self._receive, columns, subscriber.state, shown)
                except RuntimeError:  # the loop has ended
                    return

    def _receive(self, columns: EventColumns | None, state: Health, counters: dict[str, int]) -> None:
        if self._stop.is_set():
            return
        self._reported, self.counters = state, counters
        if columns is not None:
            self._received_s = time.monotonic()
            self._apply(columns)

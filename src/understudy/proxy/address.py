"""Where an engine behind a router is."""

from __future__ import annotations

import msgspec


class WorkerAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine: its URL and event endpoints; without them `/kv_event_sources` is read (vLLM 0.32)."""

    url: str
    events: str | None = None
    replay: str | None = None
    topic: str | None = None

    @classmethod
    def parse(cls, text: str) -> WorkerAddress:
        """Parse `URL`, `URL=EVENTS` or `URL=EVENTS+REPLAY`."""
        url, _, rest = text.partition("=")
        events, _, replay = rest.partition("+")
        return cls(url=url, events=events or None, replay=replay or None)

"""Counts the requests of a front end: each that arrives ends once, for a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.http import Connection

REASONS = ("completed", "refused", "failed", "disconnected")
"""How requests end: answered in full, with a client's error, with a server's error, or without their client."""


class Ledger:
    """The requests that a front end has forwarded."""

    def __init__(self) -> None:
        self.arrived = 0
        self.ended = dict.fromkeys(REASONS, 0)
        self._open: set[Connection] = set()

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    def begin(self, connection: Connection) -> None:
        """Count a request that has arrived."""
        self.arrived += 1
        self._open.add(connection)

    def end(self, connection: Connection) -> None:
        """Count the end of a request. No effect if it has ended."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        self.ended[_reason_of(connection)] += 1

    def find_mistake(self) -> str | None:
        """Return what is wrong if a request was lost or ended twice; None if all is well."""
        ended = sum(self.ended.values())
        if self.arrived != ended + len(self._open):
            return f"{self.arrived} requests arrived, {ended} ended and {len(self._open)} are open"
        return None


def _reason_of(connection: Connection) -> str:
    if connection.closed:
        return "disconnected"
    if connection.status >= 500 or connection.has_failed:
        return "failed"
    return "refused" if connection.status >= 400 else "completed"

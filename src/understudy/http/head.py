"""The head of a request: its line and its header fields."""

from __future__ import annotations

from typing import NamedTuple


class Head(NamedTuple):
    """A request up to its body."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    keep_alive: bool
    http_1_0: bool
    length: int
    """Length of the body; −1: chunked."""
    target: str
    """Path and query as received, with escapes, for forwarding."""

    @property
    def expects_more(self) -> bool:
        """True when the client waits for `100 Continue` before the body; HTTP/1.0 does not have it."""
        return not self.http_1_0 and self.headers.get("expect", "").lower() == "100-continue"

"""A complete request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.http.bodies import MAX_BODY_DEPTH, Decoded, decode

if TYPE_CHECKING:
    from understudy.http.head import Head


class Request:
    """A complete request."""

    __slots__ = ("_decoded", "_max_depth", "body", "head", "headers", "method", "path", "query")

    def __init__(self, head: Head, body: bytes, max_depth: int = MAX_BODY_DEPTH) -> None:
        self.head = head
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        self.body = body
        self._max_depth = max_depth
        self._decoded: Decoded | None = None

    def with_body(self, body: bytes) -> Request:
        """Return the same request with another body."""
        return Request(self.head, body, self._max_depth)

    def decode(self) -> Decoded:
        """Decode the body as JSON, once; readers share the value and must not change it."""
        if self._decoded is None:
            self._decoded = decode(self.body, self._max_depth)
        return self._decoded

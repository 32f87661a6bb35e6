"""A request, and who answers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from understudy.server.http.connection import Connection
    from understudy.server.http.parsing import Head


class Request:
    """A request that has come in whole."""

    __slots__ = ("body", "head", "headers", "method", "path", "query")

    def __init__(self, head: Head, body: bytes) -> None:
        self.head = head
        self.method = head.method
        self.path = head.path
        self.query = head.query
        self.headers = head.headers
        self.body = body


class Handler(Protocol):
    """Answers requests, at once or later. Must not raise."""

    max_body_bytes: int

    def handle(self, request: Request, connection: Connection) -> None:
        """Answer on the connection, now or when the answer is there."""

    def malformed(self, status: int, why: str) -> bytes:
        """The body of the answer to bytes that are no request."""

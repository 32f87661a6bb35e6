"""Parse the answers of engines."""

from __future__ import annotations

from typing import NamedTuple

import httptools

from understudy.http.parsing import MalformedMessage, MessageParser

MAX_HEAD_BYTES = 256 * 1024


class AnswerHead(NamedTuple):
    """An engine's answer up to its body."""

    status: int
    fields: list[tuple[str, str]]
    """Names (in lower case) and values, in order."""
    headers: dict[str, str]
    keep_alive: bool
    length: int | None
    """Bytes of the body; −1: chunked; None: it ends with the connection."""


class AnswerParser(MessageParser):
    """Reads one answer; further bytes are surplus."""

    name = "answer"
    status = 502

    def __init__(self) -> None:
        super().__init__(MAX_HEAD_BYTES)
        self._llhttp = self._answers_llhttp = httptools.HttpResponseParser(self)
        self.head: AnswerHead | None = None
        """None before the head is complete; informational answers (1xx) are skipped."""
        self.body = bytearray()
        """Unread part of the body."""
        self.complete = False
        """True once the answer has ended; one without a length ends with its connection."""
        self.surplus = False
        """True when bytes of another answer follow."""

    # ── llhttp's callbacks ──

    def on_message_begin(self) -> None:
        """Begin an answer, or report surplus bytes."""
        if self.head is not None:
            self.surplus = True
        self._begin(in_head=True)

    def on_status(self, part: bytes) -> None:
        """Check the reason, which is not passed on."""
        if any(byte < 32 and byte != 9 for byte in part):
            raise MalformedMessage(502, "answer: control character in the status line")

    def on_headers_complete(self) -> None:
        """Keep the head of the final answer."""
        self._in_head = False
        status = self._answers_llhttp.get_status_code()
        if status == 101:
            raise MalformedMessage(502, "answer: switches protocols unasked")
        if self.head is not None or status < 200:
            return
        headers = self._headers()
        length = self._length(headers)
        # HTTP/1.0 has no chunks: what follows such a body cannot be trusted.
        old = self._answers_llhttp.get_http_version() == "1.0"
        keep_alive = self._answers_llhttp.should_keep_alive() and not (old and length == -1)
        self.head = AnswerHead(status, self._fields, headers, keep_alive, length)

    def on_body(self, part: bytes) -> None:
        """Collect the body."""
        if not self.complete:
            self.body += part

    def on_message_complete(self) -> None:
        """End the answer."""
        self.complete = self.head is not None

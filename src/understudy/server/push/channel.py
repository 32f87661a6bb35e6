"""The connection between a decode server and a prefill server: lines of JSON about rooms.

The decode server begins with `{"page_size": N}`, and the prefill server answers with the same. Lines with news about
a room follow in both directions.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("understudy.server")

MAX_LINE = 1 << 16
HANDSHAKE_S = 5.0
"""Longest time for a handshake, seconds."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line of each side."""

    page_size: int


class News(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one side tells the other about a room."""

    news: Literal["offered", "reported", "done", "failed", "drained"]
    room: int
    tokens: int = 0
    """With `offered`: leading tokens that the decode server has. With `done`: cached tokens of the prompt."""
    reason: str = ""
    """With `failed`: why."""


class Channel:
    """One open connection. Call its methods in the event loop."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_news: Callable[[News], None]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._on_news = on_news

    @classmethod
    async def connect(cls, host: str, port: int, page_size: int, on_news: Callable[[News], None]) -> Channel:
        """Connect to a prefill server. OSError, or ValueError when it answers something else."""
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(host, port, limit=MAX_LINE), HANDSHAKE_S
        )
        try:
            writer.write(msgspec.json.encode(Hello(page_size)) + b"\n")
            line = await asyncio.wait_for(reader.readline(), HANDSHAKE_S)
            answer = msgspec.json.decode(line, type=Hello)
            if answer.page_size != page_size:
                raise ValueError(
                    f"Page size mismatch: prefill server has page_size={answer.page_size}, but decode server has "
                    f"page_size={page_size}"
                )
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer, on_news)

    @classmethod
    async def accept(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        page_size: int,
        on_news: Callable[[News], None],
    ) -> Channel:
        """Answer a decode server. OSError, or ValueError when it sends something else."""
        line = await asyncio.wait_for(reader.readline(), HANDSHAKE_S)
        hello = msgspec.json.decode(line, type=Hello)
        writer.write(msgspec.json.encode(Hello(page_size)) + b"\n")
        if hello.page_size != page_size:
            raise ValueError(
                f"the decode server has pages of {hello.page_size} tokens, this server {page_size}"
            )
        return cls(reader, writer, on_news)

    async def run(self) -> None:
        """Receive news until the connection ends. OSError or ValueError when it is broken."""
        while line := await self._reader.readline():
            self._on_news(msgspec.json.decode(line, type=News))

    def send(self, news: News) -> None:
        """Send news; on a closed connection they are lost."""
        if not self._writer.is_closing():
            self._writer.write(msgspec.json.encode(news) + b"\n")

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()

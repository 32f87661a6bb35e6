"""Clients who do not read, or who never come to the end of their header: what it costs, and that nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import httptools
import pytest

from server.client import serving
from understudy.http.connection import Connection
from understudy.http.outbox import Outbox
from understudy.lateness import Lateness

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from understudy.server.server import Server

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"


@contextlib.asynccontextmanager
async def unread(server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of somebody who reads nothing before `resume_reading`, and whose system takes little for it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    reader, writer = await asyncio.open_connection(sock=sock)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    try:
        yield reader, writer
    finally:
        writer.close()


async def settled(server: Server) -> int:
    """The bytes that wait to be read, once they are as many as before however often everybody had a turn."""
    before, same = 0, 0
    while same < 20 or not before:
        await asyncio.sleep(0.005)
        now = sum(connection.unsent_bytes for connection in server.runtime.outbox.open)
        before, same = now, same + 1 if now == before else 0
    return before


@pytest.mark.parametrize("ends", ["close", "keep-alive"])
def test_a_drain_waits_until_a_whole_answer_has_left(ends: str) -> None:
    async def main() -> None:
        async with serving(clock_speed=1000.0) as (_, server), unread(server) as (reader, writer):
            body = b'{"prompt":"x","max_tokens":2000,"n":400,"return_token_ids":true}'
            head = HEAD + f"connection: {ends}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            writer.write(head + body)
            assert await settled(server) > 1_000_000
            assert not server.app.endpoints.in_flight
            stopped = asyncio.create_task(server.stop(600.0))
            for _ in range(20):
                await asyncio.sleep(0.005)
            assert not stopped.done()
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            told = await reader.readuntil(b"\r\n\r\n")
            length = int(told.split(b"content-length: ")[1].split(b"\r\n")[0])
            assert len(await reader.readexactly(length)) == length
            await asyncio.wait_for(stopped, 20)

    asyncio.run(main())


def test_who_does_not_read_its_answers_gets_no_more_of_them_until_it_does() -> None:
    async def main() -> None:
        async with serving() as (client, server), unread(server) as (reader, writer):
            size = len((await client.get("/openapi.json")).body)
            asked = 20_000_000 // size
            writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: t\r\n\r\n" * (asked - 1))
            writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
            assert await settled(server) < (1 << 18) + size
            assert (await client.get("/health")).status == 200
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            assert (await reader.read()).count(b"HTTP/1.1 200 OK") == asked

    asyncio.run(main())


class Nobody:
    """Hears of requests."""

    max_body_bytes = 1000
    max_body_depth = 64

    def __init__(self) -> None:
        self.heard: list[str] = []

    def handle(self, request: Any, connection: Connection) -> None:
        self.heard.append(request.path)
        connection.respond(200, b"")

    def malformed(self, status: int, why: str) -> bytes:
        return f"{status} {why}".encode()


class Copied(httptools.HttpRequestParser):
    """Counts the calls, each of which copies the header line that has not ended."""

    calls = 0

    def feed_data(self, data: Any) -> None:
        self.calls += 1
        super().feed_data(data)


def test_a_long_header_that_comes_in_many_pieces_is_copied_a_few_times() -> None:
    async def main() -> None:
        here, there = socket.socketpair()
        handler = Nobody()
        connection = Connection(handler, Outbox(None, Lateness()))  # type: ignore[arg-type]
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=here)
        parser = connection._parser
        parser._llhttp = parser._requests_llhttp = copied = Copied(parser)
        connection.data_received(b"GET /a HTTP/1.1\r\nhost: t\r\nx: ")
        for _ in range(30_000):
            connection.data_received(b"a" * 100)
        assert copied.calls < 800
        for end in (b"\r", b"\n", b"\r", b"\n"):
            assert not handler.heard
            connection.data_received(end)
        assert handler.heard == ["/a"]
        connection.data_received(b"GET /b HTTP/1.1\r\nhost: t\r\nx: y\r\n\r\n")
        assert handler.heard == ["/a", "/b"]
        connection.data_received(b"GET /c HTTP/1.1\n")
        connection.data_received(b"\n")
        there.setblocking(True)
        assert b"400 request: Expected CRLF after version; send plain HTTP/1.1" in there.recv(1 << 16)
        there.close()
        connection.drop()

    asyncio.run(main())

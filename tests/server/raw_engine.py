"""Engines that answer with given bytes, and a router in front of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from server.client import Client
from understudy.proxy.address import WorkerAddress
from understudy.proxy.service import RouterService, RouterSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Act = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]


BODY = {"prompt": "x", "max_tokens": 1}
OWN_QUESTIONS = (
    b"GET /health ",
    b"GET /kv_event",
    b"GET /metrics ",
    b"GET /server_info ",
    b"GET /v1/models ",
)
"""Requests that a router sends when it registers an engine, and to check its health."""


def answer(body: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (more, len(body), body)


class RawEngine:
    """Answers the router's own questions as an engine does, and all others as `act` says (False: then close)."""

    def __init__(self, act: Act) -> None:
        self.asked: list[bytes] = []
        """Request lines, in order."""
        self.connections: list[asyncio.StreamWriter] = []
        self.port = 0
        self._act = act

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(writer)
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                line = head.partition(b"\r\n")[0]
                if line.startswith(OWN_QUESTIONS):
                    status = b"200 OK" if b"/health" in line else b"404 Not Found"
                    writer.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status)
                    continue
                self.asked.append(line)
                if not await self._act(line, reader, writer):
                    break
        writer.close()


def says(data: bytes) -> Act:
    async def act(line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        return True

    return act


@asynccontextmanager
async def listening(act: Act) -> AsyncIterator[RawEngine]:
    engine = RawEngine(act)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    engine.port = server.sockets[0].getsockname()[1]
    try:
        yield engine
    finally:
        server.close()
        for writer in engine.connections:
            writer.transport.abort()
        await asyncio.sleep(0.01)  # until they are closed


@asynccontextmanager
async def routed(*acts: Act, **settings: Any) -> AsyncIterator[tuple[Client, RouterService, list[RawEngine]]]:
    """A router in front of such engines."""
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(listening(act)) for act in acts]
        addresses = tuple(WorkerAddress(url=f"http://127.0.0.1:{engine.port}") for engine in engines)
        given: dict[str, Any] = {"routing": "round_robin", "block_size": 16, "look_every_s": 60.0, **settings}
        service = RouterService(RouterSettings(workers=addresses, port=0, **given))
        await service.start()
        stack.push_async_callback(service.stop)
        yield Client(service.port), service, engines


def number_of(line: bytes) -> bytes:
    return line.partition(b"?n=")[2].partition(b" ")[0]

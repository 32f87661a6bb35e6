"""Connections from the router to an engine: each answer belongs to its request, and no request is sent twice."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from server.client import Client
from server.router_scene import C
from understudy.cli import main
from understudy.server.proxy.service import RouterService, RouterSettings
from understudy.server.proxy.upstream import Upstream, UpstreamError
from understudy.server.proxy.workers import WorkerAddress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Act = Callable[[bytes, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bool]]

BODY = {"prompt": "x", "max_tokens": 1}


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
                if line.startswith((b"GET /health ", b"GET /kv_event", b"GET /metrics ", b"GET /v1/models ")):
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


# ── Unread bytes ──


@pytest.mark.parametrize("behind", [answer(b"stolen"), b"x", b"\r\n", b"HTTP/1.1 200 OK\r\n"])
@pytest.mark.parametrize("chunked", [False, True])
def test_bytes_behind_an_answer_never_reach_the_next_request(behind: bytes, chunked: bool) -> None:
    async def act(line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        own = number_of(line)
        framed = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (
            len(own),
            own,
        )
        writer.write((framed if chunked else answer(own)) + behind)
        return True

    async def main() -> None:
        async with routed(act) as (client, _, (engine,)):
            for number in range(6):
                reply = await client.post(f"{C}?n={number}", BODY)
                assert (reply.status, reply.body) == (200, b"%d" % number)
            assert [number_of(line) for line in engine.asked] == [b"%d" % number for number in range(6)]

    asyncio.run(main())


def test_bytes_that_come_while_a_connection_is_idle_make_it_unusable() -> None:
    async def main() -> None:
        async with listening(says(answer(b"own"))) as engine:
            upstream = Upstream(f"http://127.0.0.1:{engine.port}")
            assert await upstream.get("/a") == (200, b"own")
            engine.connections[0].write(answer(b"late"))
            await asyncio.sleep(0.05)  # it has arrived, and the connection was idle
            assert await upstream.get("/b") == (200, b"own")
            assert len(engine.connections) == 2
            upstream.close()

    asyncio.run(main())


def test_bytes_that_wait_in_the_socket_at_the_moment_of_reuse_are_seen() -> None:
    """The loop has not read them yet when the connection is taken out of the pool."""

    async def main() -> None:
        async with listening(says(answer(b"own"))) as engine:
            upstream = Upstream(f"http://127.0.0.1:{engine.port}")
            assert await upstream.get("/a") == (200, b"own")
            engine.connections[0].write(
                answer(b"late")
            )  # written at once; nothing is awaited before the next
            assert await upstream.get("/b") == (200, b"own")
            assert len(engine.connections) == 2
            upstream.close()

    asyncio.run(main())


def test_a_connection_whose_answer_ended_cleanly_is_used_again() -> None:
    async def main() -> None:
        async with listening(says(answer(b"own"))) as engine:
            upstream = Upstream(f"http://127.0.0.1:{engine.port}")
            for _ in range(5):
                assert await upstream.get("/a") == (200, b"own")
            assert len(engine.connections) == 1
            upstream.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "data",
    [
        answer(b"own", b"connection: close\r\n"),
        answer(b"own", b"connection: x, Close\r\n"),
        answer(b"own").replace(b"HTTP/1.1", b"HTTP/1.0"),
        b"HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nown\r\n0\r\n\r\n",
    ],
)
def test_a_connection_that_the_engine_ends_is_not_used_again(data: bytes) -> None:
    async def main() -> None:
        async with listening(says(data)) as engine:
            upstream = Upstream(f"http://127.0.0.1:{engine.port}")
            for number in range(3):
                assert await upstream.get("/a") == (200, b"own")
                assert len(engine.connections) == number + 1
            upstream.close()

    asyncio.run(main())


def test_an_answer_to_a_request_that_was_not_read_whole_ends_its_connection() -> None:
    """Else the engine would take the rest of the body for the next request."""

    async def main() -> None:
        refusal = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno"
        seen: list[bytes] = []
        writers: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(refusal)
            writers.append(writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        upstream = Upstream(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for number in range(2):
            assert await upstream.post("/big", b"x" * (32 << 20)) == (413, b"no")
            assert len(seen) == number + 1
        upstream.close()
        for writer in writers:
            writer.transport.abort()
        server.close()
        await asyncio.sleep(0.01)

    asyncio.run(main())


# ── Once ──


def test_a_request_that_a_reused_connection_closes_on_is_not_sent_again() -> None:
    async def act(line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        if b"bad" in line:
            return False
        writer.write(answer(b"ok"))
        return True

    async def main() -> None:
        async with routed(act, act) as (client, service, engines):
            for path in (C, f"{C}?bad", C, f"{C}?bad", C, f"{C}?bad", "/other?bad", C):
                reply = await client.post(path, BODY)
                assert reply.status == (502 if "bad" in path else 200)
            assert sum(b"bad" in line for engine in engines for line in engine.asked) == 4
            assert service.proxy.counts["retried"] == 0

    asyncio.run(main())


def test_a_connection_that_was_closed_before_the_request_is_replaced() -> None:
    async def main() -> None:
        async with listening(says(answer(b"own"))) as engine:
            upstream = Upstream(f"http://127.0.0.1:{engine.port}")
            for number in range(3):
                assert await upstream.get("/a") == (200, b"own")
                engine.connections[-1].get_extra_info("socket").shutdown(socket.SHUT_WR)
                if number:  # else the loop has not seen it yet
                    await asyncio.sleep(0.02)
            assert len(engine.asked) == len(engine.connections) == 3
            upstream.close()

    asyncio.run(main())


# ── Time limits ──


async def _silent(line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    if b"?n=head" in line:
        writer.write(b"HTTP/1.1 200 OK\r\n")
    if b"?n=whole" in line:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
    if b"?n=first" in line:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
    if b"?n=stream" in line:
        kind = b"content-type: text/event-stream\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n%btransfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n" % kind)
    if b"?n=plain" in line:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n")
    await reader.read()  # until the router has gone
    return False


@pytest.mark.parametrize("place", ["nothing", "head", "whole"])
def test_an_engine_that_stops_before_its_answer_is_whole_gets_504_for_its_client(place: str) -> None:
    async def main() -> None:
        async with routed(_silent, first_byte_timeout_s=0.1, stall_timeout_s=0.05) as (client, _, (engine,)):
            for path in (C, "/other"):
                reply = await client.post(f"{path}?n={place}", BODY)
                told = reply.json["error"]
                assert (reply.status, told["code"]) == (504, 504)
                flag = "--stall-timeout-s" if place == "whole" else "--first-byte-timeout-s"
                assert flag in told["message"]
            assert len(engine.asked) == 2

    asyncio.run(main())


@pytest.mark.parametrize("place", ["first", "stream"])
def test_a_stream_that_stops_ends_with_an_error(place: str) -> None:
    async def main() -> None:
        async with routed(_silent, first_byte_timeout_s=0.1, stall_timeout_s=0.05) as (client, _, _):
            reply = await client.post(f"{C}?n={place}", BODY)
            *before, error, done = reply.events
            assert before == ([1] if place == "stream" else [])
            assert (reply.status, error["error"]["code"], done) == (200, 504, "[DONE]")

    asyncio.run(main())


def test_an_answer_in_chunks_that_is_no_event_stream_is_cut_where_it_stops() -> None:
    async def main() -> None:
        async with routed(_silent, stall_timeout_s=0.05) as (client, _, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(f"POST {C}?n=plain HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n\r\n{{}}".encode())
            told = b""
            with suppress(ConnectionError):
                while part := await asyncio.wait_for(reader.read(4096), 10):
                    told += part
            assert told.endswith(b"half\r\n")
            writer.close()

    asyncio.run(main())


def test_the_limit_is_on_silence_and_not_on_the_length_of_an_answer() -> None:
    async def act(line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(12):
            writer.write(b"9\r\ndata: 1\n\n\r\n")
            await asyncio.sleep(0.05)
        writer.write(b"0\r\n\r\n")
        return True

    async def main() -> None:
        async with routed(act, first_byte_timeout_s=0.4, stall_timeout_s=0.4) as (client, _, _):
            assert (await client.post(C, BODY)).events == [1] * 12
        async with routed(act, first_byte_timeout_s=0.0, stall_timeout_s=0.0) as (client, _, _):
            assert (await client.post(C, BODY)).events == [1] * 12  # 0: no limit

    asyncio.run(main())


# ── Answers that are no HTTP ──

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "data",
    [
        *(
            OK + b"content-length: %b\r\n\r\nabcde" % length
            for length in (b"-5", b"+5", b"5x", b"0x5", b"", b"5, 5")
        ),
        *(
            OK + b"content-length: %b\r\n\r\nabcde" % length
            for length in (b"1_0", b"\xb2", b"5.0", b"9" * 30)
        ),
        OK + b"content-length: 5\r\ncontent-length: 2\r\n\r\nabcde",
        OK + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
        OK + b"transfer-encoding: gzip\r\n\r\nabc",
        OK + b"x: a\x00b\r\ncontent-length: 2\r\n\r\nok",
        OK + b"x: a\x0bb\r\ncontent-length: 2\r\n\r\nok",
        OK + b"x: a\nb: c\r\ncontent-length: 2\r\n\r\nok",
        OK + b"x: a\rb\r\ncontent-length: 2\r\n\r\nok",
        OK + b"x\x00y: a\r\ncontent-length: 2\r\n\r\nok",
        OK + b"x y: a\r\ncontent-length: 2\r\n\r\nok",
        OK + b" folded: a\r\ncontent-length: 2\r\n\r\nok",
        OK + b"no colon\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 O\x00K\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 2_0 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 99 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/2 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\ncontent-length: 2\n\nok",
    ],
)
def test_an_answer_that_is_no_http_is_a_502(data: bytes) -> None:
    async def main() -> None:
        async with routed(says(data)) as (client, _, (engine,)):
            for path in (C, "/other"):
                reply = await client.post(path, BODY)
                assert (reply.status, reply.json["error"]["code"]) == (502, 502)
                assert b"\x00" not in reply.body
            assert len(engine.asked) == 2

    asyncio.run(main())


@pytest.mark.parametrize(("size", "status"), [(255 << 10, 200), (257 << 10, 502)])
def test_the_head_of_an_answer_may_have_256_kb(size: int, status: int) -> None:
    long = b"x-long: " + b"a" * size + b"\r\n"

    async def main() -> None:
        async with routed(says(answer(b"ok", long))) as (client, _, _):
            for path in (C, "/other"):
                reply = await client.post(path, BODY)
                assert reply.status == status
                if status == 200:
                    assert (reply.body, len(reply.headers["x-long"])) == (b"ok", size)
                else:
                    assert "headers larger than 262144 bytes" in reply.json["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize("size", [b"-1", b"0x2", b"+2", b"2_0", b"", b"2 2", b"g", b"2\x00"])
def test_a_malformed_chunk_breaks_its_answer_off(size: bytes) -> None:
    data = OK + b"transfer-encoding: chunked\r\n\r\n%b\r\nok\r\n0\r\n\r\n" % size

    async def main() -> None:
        async with listening(says(data)) as engine:
            upstream = Upstream(f"http://127.0.0.1:{engine.port}")
            with pytest.raises(UpstreamError):
                await upstream.get("/a")
            upstream.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "flag",
    [
        *("--first-byte-timeout-s=-1", "--stall-timeout-s=nan", "--stall-timeout-s=-1"),
        *("--max-request-body-size-mb=0", "--max-request-body-depth=0"),
    ],
)
def test_limits_of_the_router_that_are_none_are_refused(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", flag]) == 2
    assert flag.partition("=")[0] in capsys.readouterr().err

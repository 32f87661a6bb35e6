"""Connections from the router to an engine: each answer belongs to its request, and no request is sent twice."""

from __future__ import annotations

import asyncio
import socket

import pytest

from server.raw_engine import BODY, answer, listening, number_of, routed, says
from server.router_scene import C
from understudy.proxy.upstream import Upstream

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

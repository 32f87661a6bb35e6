"""Answers of an engine that are not HTTP: the router's client gets an error."""

from __future__ import annotations

import asyncio

import pytest

from server.raw_engine import BODY, answer, listening, routed, says
from server.router_scene import C
from understudy.proxy.upstream import Upstream, UpstreamError

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

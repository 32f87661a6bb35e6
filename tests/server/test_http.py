"""The HTTP layer: what is a request, what a client may do to it, and what happens when it goes away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.client import Client, parse_reply, serving

BODY = b'{"prompt":"x","max_tokens":2}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"


def run(test: Any, **settings: Any) -> None:
    async def main() -> None:
        async with serving(**settings) as (client, server):
            await test(client, server)

    asyncio.run(main())


def test_a_connection_answers_one_request_after_the_other() -> None:
    async def test(client: Client, _: object) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        one = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        writer.write(one * 3)
        for _ in range(3):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(size)
        writer.close()

    run(test)


def test_who_asks_for_a_head_gets_no_body() -> None:
    async def test(client: Client, _: object) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        for path, status in ((b"/metrics", b"200"), (b"/v1/models", b"405"), (b"/nowhere", b"404")):
            writer.write(b"HEAD " + path + b" HTTP/1.1\r\nhost: t\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 " + status)
            assert b"content-length: 0\r\n" not in head
        writer.write(b"GET /version HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        assert parse_reply(await asyncio.wait_for(reader.read(), 5)).json["version"]  # nothing lay in between
        writer.close()

    run(test)


def test_a_body_may_come_in_chunks_and_byte_by_byte() -> None:
    async def test(client: Client, _: object) -> None:
        chunked = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
        chunked += (
            b"5;x=1\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\nt: u\r\n\r\n"
        )
        assert (await client.raw(chunked)).status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        for byte in chunked:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert parse_reply(await reader.read()).status == 200
        writer.close()

    run(test)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n: x\r\n\r\n", 400),
        (b"G\x00T /health HTTP/1.1\r\n\r\n", 400),
        (HEAD + b"content-length: -1\r\n\r\n", 400),
        (HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: gzip\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (HEAD + b"content-length: 99999999999\r\n\r\n", 413),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nfffffff\r\n", 413),
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
    ],
)
def test_bytes_that_are_no_request_are_refused_as_json_and_the_connection_ends(
    data: bytes, status: int
) -> None:
    async def test(client: Client, _: object) -> None:
        reply = await client.raw(data)
        assert reply.status == status
        assert reply.json["error"]["code"] == status
        assert (await client.get("/health")).status == 200

    run(test)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(stream: bool) -> None:
    async def test(client: Client, server: Any) -> None:
        core = server.worker.cores[0]
        body = b'{"prompt":"x","max_tokens":4000,"stream":%s}' % (b"true" if stream else b"false")
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        if stream:
            await reader.readuntil(b"data: ")
        else:
            await asyncio.sleep(0.05)
        assert len(core.live) == 1
        writer.close()
        for _ in range(100):
            await asyncio.sleep(0.01)
            if not core.live:
                break
        assert core.live == {}
        assert core.engine.pool[1] == 0
        assert not server.app.endpoints.in_flight
        page = (await client.get("/metrics")).body.decode()
        assert 'finished_reason="abort",model_name="stub"} 0.0' in page

    run(test)


def test_an_old_client_gets_a_stream_without_chunks() -> None:
    async def test(client: Client, _: object) -> None:
        body = b'{"prompt":"x","max_tokens":2,"stream":true}'
        head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0")
        reply = await client.raw(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert "transfer-encoding" not in reply.headers
        assert reply.events[-1] == "[DONE]"

    run(test)


def test_other_origins_are_refused_unless_they_are_named() -> None:
    async def test(client: Client, _: object) -> None:
        ask = {"origin": "http://a", "access-control-request-method": "POST"}
        refused = await client.ask("OPTIONS", "/v1/models", headers={**ask, "origin": "http://b"})
        assert refused.status == 400
        allowed = await client.ask("OPTIONS", "/v1/models", headers=ask)
        assert (allowed.status, allowed.headers["access-control-allow-origin"]) == (200, "http://a")

    run(test, allowed_origins=("http://a",))


def test_the_load_header_is_there_when_it_is_asked_for() -> None:
    async def test(client: Client, _: object) -> None:
        asked = {"endpoint-load-metrics-format": "TEXT"}
        reply = await client.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=asked)
        assert reply.headers["endpoint-load-metrics"].startswith(
            "TEXT named_metrics.num_requests_waiting=0.0"
        )

    run(test)


def test_ranks_take_the_requests_that_name_them() -> None:
    async def test(client: Client, server: Any) -> None:
        for _ in range(3):
            await client.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, x_data_parallel_rank="1")
        assert [metrics.generation_tokens.value for metrics in server.worker.metrics] == [0, 3]
        bad = await client.post("/v1/completions", {"prompt": "x"}, x_data_parallel_rank="7")
        assert bad.status == 400

    run(test, data_parallel_size=2)

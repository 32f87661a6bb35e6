"""The HTTP layer: what is a request, what a client may do to it, and what happens when it goes away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from pathlib import Path
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
        (HEAD + b"transfer-encoding: chunked\r\n\r\n2\n\r\n{}\r\n0\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\ngarbage\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nGET /version HTTP/1.1\r\nhost: t\r\n\r\n", 400),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
        (HEAD + b"transfer-encoding\n: chunked\r\n\r\n", 400),
        (HEAD + b"content-length: 99999999999\r\n\r\n", 413),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nfffffff\r\n" + b"x" * 2001, 413),
        (b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: t\r\na: " + b"b" * (4 << 20) + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: t\r\n" + (b"a: " + b"b" * 99_999 + b"\r\n") * 42 + b"c:", 431),
    ],
)
def test_bytes_that_are_no_request_are_refused_as_json_and_the_connection_ends(
    data: bytes, status: int
) -> None:
    async def test(client: Client, _: object) -> None:
        reply = await client.raw(data)
        assert reply.status == status
        assert reply.json["error"]["code"] == status
        assert reply.headers["connection"] == "close"
        assert (await client.get("/health")).status == 200

    run(test, max_body_bytes=2000)


def test_a_head_may_have_4_million_bytes() -> None:
    async def test(client: Client, _: object) -> None:
        long = b"b" * 2_000_000
        head = b"GET /version?" + long + b" HTTP/1.1\r\nhost: t\r\nconnection: close\r\na: " + long
        assert (await client.raw(head + b"\r\n\r\n")).status == 200

    run(test)


def test_a_request_for_another_protocol_is_answered_in_http_1_1() -> None:
    async def test(client: Client, _: object) -> None:
        upgrade = (
            HEAD + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
        )
        asked = upgrade + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(asked * 2 + b"GET /version HTTP/1.1\r\n\r\n")
        told = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert told.count(b"HTTP/1.1 200 OK") == told.count(b'"finish_reason":"length"') == 2
        assert b"host: missing" in told.partition(b"HTTP/1.1 400")[2]

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


def test_an_old_client_is_told_that_its_connection_stays() -> None:
    async def test(client: Client, _: object) -> None:
        asked = b"GET /version HTTP/1.0\r\n"
        assert (await client.raw(asked + b"\r\n")).headers["connection"] == "close"
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        for _ in range(2):
            writer.write(asked + b"Connection: Keep-Alive\r\nexpect: 100-continue\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 200")  # and nothing of 100, which it would not know
            assert b"\r\nconnection: keep-alive\r\n" in head
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        stream = BODY.replace(b"}", b',"stream":true}')
        writer.write(HEAD.replace(b"1.1", b"1.0") + b"connection: keep-alive\r\n")
        writer.write(b"content-length: %d\r\n\r\n" % len(stream) + stream)
        rest = await asyncio.wait_for(reader.read(), 5)  # its end is that of the connection
        assert b"connection: close" in rest
        assert b"transfer-encoding" not in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        writer.close()
        assert b"connection:" not in (await client.get("/version")).body

    run(test)


@pytest.mark.parametrize(
    "said",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # the greeting of TLS
        b"GET /version HTTP/1.1\nhost: t\n\n",
        b"\x00",
        b" GET / HTTP/1.1",
    ],
)
def test_what_cannot_become_a_request_is_refused_at_once(said: bytes) -> None:
    async def test(client: Client, _: object) -> None:
        reply = await asyncio.wait_for(client.raw(said), 4)
        assert reply.status == 400
        assert reply.json["error"]["type"] == "Bad Request"

    run(test)


def test_an_empty_line_before_a_request_may_come_in_halves() -> None:
    async def test(client: Client, _: object) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        for _ in range(2):
            writer.write(b"\r")
            await asyncio.sleep(0.02)
            writer.write(b"\nGET /version HTTP/1.1\r\nhost: t\r\n\r\n")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
            assert head.startswith(b"HTTP/1.1 200")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        writer.close()

    run(test)


def test_who_says_more_than_any_request_and_waits_for_no_answer_is_dropped() -> None:
    async def test(client: Client, server: Any) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", client.port)
        body = b'{"prompt":"x","max_tokens":4000,"ignore_eos":true}'
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        with contextlib.suppress(ConnectionError):
            while True:  # it would end by itself after some minutes
                writer.write(b"x" * 65536)
                await writer.drain()
        writer.close()
        while server.worker.live():
            await asyncio.sleep(0.01)
        assert server.worker.metrics[0].success["length"].value == 0  # it was cancelled
        assert (await client.get("/health")).status == 200

    run(test, max_body_bytes=1000, latency_ms=(1.0, 100.0))


def test_a_slow_client_gets_all_of_its_answer_and_a_very_slow_one_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def read_after(client: Client, server: Any) -> bytes:
        """The answer to somebody who begins to read when all of it was generated."""
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", client.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = b'{"prompt":"x","max_tokens":3000,"n":6,"ignore_eos":true,"stream":true,"logprobs":5}'
        writer.write(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        while not server.worker.cores[0].steps or server.worker.live():
            await asyncio.sleep(0.01)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def patient(client: Client, server: Any) -> None:
        answer = await read_after(client, server)
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert answer.count(b'"finish_reason":"length"') == 6

    async def impatient(client: Client, server: Any) -> None:
        answer = await read_after(client, server)
        assert b"[DONE]" not in answer
        assert not server.app.endpoints.in_flight
        assert server.worker.cores[0].engine.pool[1] == 0
        assert (await client.get("/health")).status == 200

    monkeypatch.setattr("understudy.http.outbox.MAX_UNSENT_BYTES", 1 << 30)
    run(patient, clock_speed=100.0)
    monkeypatch.setattr("understudy.http.outbox.MAX_UNSENT_BYTES", 1 << 16)
    run(impatient, clock_speed=100.0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's limit")
def test_many_clients_may_come_while_the_server_is_busy() -> None:
    if int(Path("/proc/sys/net/core/somaxconn").read_text()) < 512:
        pytest.skip("the system lets fewer wait")

    async def test(client: Client, _: object) -> None:
        # Nothing is accepted meanwhile: this is the server's own loop.
        waiting = [socket.create_connection(("127.0.0.1", client.port), timeout=0.9) for _ in range(400)]
        for one in waiting:
            one.close()
        assert (await client.get("/health")).status == 200

    run(test)

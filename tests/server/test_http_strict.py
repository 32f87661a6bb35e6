"""Requests that two readers could understand differently are refused, by a server and by a router in front of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from server.client import Client
from server.router_scene import C, Scene, play

if TYPE_CHECKING:
    from understudy.http import Connection, Request

BODY = b'{"prompt":"x","max_tokens":1}'
HEAD = f"POST {C} HTTP/1.1\r\nhost: t\r\nconnection: close\r\ncontent-type: application/json\r\n".encode()
GET = b"GET /version HTTP/1.1\r\n"


def both(told: Scene) -> tuple[Client, Client]:
    return told.client, Client(told.servers[0].port)


REFUSED = [
    *(HEAD + b"content-length: %b\r\n\r\n" % length + BODY for length in (b"-5", b"+5", b"5x", b"", b"0x5")),
    *(HEAD + b"content-length: %b\r\n\r\n" % length + BODY for length in (b"1_0", b"\xb2", b"5, 5", b"5.0")),
    HEAD + b"content-length: 29\r\ncontent-length: 5\r\n\r\n" + BODY,
    HEAD + b"content-length: 29\r\ncontent-length: 29\r\n\r\n" + BODY,
    HEAD + b"content-length: 29\r\ntransfer-encoding: chunked\r\n\r\n1d\r\n" + BODY + b"\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: chunked, chunked\r\n\r\n1d\r\n" + BODY + b"\r\n0\r\n\r\n",
    HEAD + b"transfer-encoding: xchunked\r\n\r\n1d\r\n" + BODY + b"\r\n0\r\n\r\n",
    HEAD.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n1d\r\n" + BODY + b"\r\n0\r\n\r\n",
    *(
        GET + b"host: t\r\nx: a%bb\r\n\r\n" % byte
        for byte in (b"\x00", b"\x01", b"\x0b", b"\r", b"\n", b"\x1f", b"\x7f")
    ),
    *(GET + b"host: t\r\nx%by: a\r\n\r\n" % byte for byte in (b"\x00", b"\t", b" ", b"\x7f", b"\xff", b"(")),
    GET + b"host: t\r\n folded: a\r\n\r\n",
    GET + b"host: t\r\nx: a\r\n folded\r\n\r\n",
    GET + b"host : t\r\n\r\n",
    GET + b"\r\n",
    GET + b"x: y\r\n\r\n",
    GET + b"host: t\r\nhost: t\r\n\r\n",
    GET + b"host: t\r\nHost: u\r\n\r\n",
    GET.replace(b"1.1", b"1.0") + b"host: t\r\nhost: u\r\n\r\n",
]


def test_ambiguous_requests_are_refused_and_passed_on_to_no_engine() -> None:
    async def test(told: Scene) -> None:
        heard: list[str] = []

        def hear(request: Request, _: Connection) -> bool:
            heard.append(request.path)
            return False

        told.servers[0].app.before.append(hear)
        for data in REFUSED:
            for client in both(told):
                reply = await client.raw(data)
                assert reply.status == 400, data
                assert reply.json["error"]["code"] == 400
                assert reply.headers["connection"] == "close"
        assert set(heard) <= {"/health"}  # the router's own question
        assert [(await client.get("/version")).status for client in both(told)] == [200, 200]

    play(test, 1, "round_robin")


@pytest.mark.parametrize(
    "data",
    [
        b"GET /version HTTP/1.0\r\n\r\n",
        b"GET /version HTTP/1.0\r\nhost: t\r\n\r\n",
        b"GET http://elsewhere/version HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n",
        b"GET http://elsewhere/version HTTP/1.0\r\n\r\n",
        b"GET HTTPS://elsewhere/version?a=b HTTP/1.1\r\nhost: elsewhere\r\nconnection: close\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost:\r\nconnection: close\r\n\r\n",
        b"GET /version HTTP/1.1\r\nhost: t\r\nconnection: close\r\nx: a\tb\xff\r\ny:\r\n\r\n",
    ],
)
def test_old_and_unusual_requests_are_answered(data: bytes) -> None:
    async def test(told: Scene) -> None:
        for client in both(told):
            reply = await asyncio.wait_for(client.raw(data), 10)
            assert (reply.status, reply.json) == (200, {"version": "0.33.0"})

    play(test, 1, "round_robin")

"""Mutated requests and answers, and a transport that keeps what a connection writes."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from server.ambiguous import CASES
from understudy.http import Connection, Outbox
from understudy.http.parsing import MalformedMessage, RequestParser
from understudy.lateness import Lateness
from understudy.proxy.answers import AnswerParser
from understudy.proxy.proxy import forwarded_headers
from understudy.proxy.upstream import request_bytes

if TYPE_CHECKING:
    from understudy.http import Request

PIECES = (
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b" ",
        b"\t",
        b":",
        b";",
        b",",
        b"0",
        b"\r\n\r\n",
        b"0\r\n\r\n",
        b"\xff",
        b"\x0b",
    ),
    *(b"content-length: 3\r\n", b"transfer-encoding: chunked\r\n", b"host: u\r\n", b"connection: close\r\n"),
    *(
        b"connection: upgrade\r\nupgrade: h2c\r\n",
        b"expect: 100-continue\r\n",
        b"HTTP/1.0",
        b"HTTP/1.1 100 X\r\n\r\n",
    ),
    *(b"GET /v1/x HTTP/1.1\r\nhost: t\r\n\r\n", b"3\r\nabc\r\n", b"\r\n folded", b"%0d%0a", b"http://u/"),
)
ANSWERS = (
    b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nx: y\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.0 404 Not Found\r\nx: y\r\n\r\nuntil the end",
    b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n",
)


def mutate(draw: random.Random, sources: tuple[bytes, ...]) -> bytes:
    """One to four changes of a message: bytes replaced, inserted, removed, repeated, or of another message."""
    data = draw.choice(sources)
    for _ in range(draw.randint(1, 4)):
        here = draw.randrange(len(data) + 1)
        there = min(len(data), here + draw.choice((0, 1, 1, 2, 9)))
        piece = draw.choice(
            (
                draw.choice(PIECES),
                draw.choice(PIECES),
                bytes([draw.randrange(256)]),
                data[here : here + 30],
                draw.choice(sources)[here:],
            )
        )
        data = data[:here] + piece + data[there:]
    return data


def pieces(draw: random.Random, data: bytes) -> list[bytes]:
    """Cut at random places."""
    cuts = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(6)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if end > start]


class Written(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.data += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0


class Recorder:
    """Answers every request, and keeps it."""

    max_body_bytes = 2000
    max_body_depth = 64

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def handle(self, request: Request, connection: Connection) -> None:
        self.requests.append(request)
        connection.respond(200, b"ok")

    def malformed(self, status: int, why: str) -> bytes:
        assert status in (400, 413, 431)
        assert why
        return b"refused"


def key(request: Request) -> tuple[str, str, bytes]:
    return request.method, request.head.target, request.body


async def feed(parts: list[bytes]) -> tuple[list[Request], bytes]:
    """What a connection that receives these parts sees, and what it writes."""
    handler, transport = Recorder(), Written()
    connection = Connection(handler, Outbox(None, Lateness()))  # type: ignore[arg-type]
    connection.connection_made(transport)
    for part in parts:
        if transport.closed:
            break
        connection.data_received(part)
        while connection._has_more and not transport.closed:
            await asyncio.sleep(0)
    connection.connection_lost(None)
    return handler.requests, bytes(transport.data)


async def check_request(draw: random.Random, sources: tuple[bytes, ...]) -> int:
    """Check one mutated request; return how many requests it contains."""
    data = mutate(draw, sources)
    seen, written = await feed([data])
    seen_in_parts, written_in_parts = await feed(pieces(draw, data))
    assert [key(one) for one in seen] == [key(one) for one in seen_in_parts], data
    for answers, requests in ((written, seen), (written_in_parts, seen_in_parts)):
        refused = answers.count(b"refused")
        assert refused <= 1
        assert answers.count(b"HTTP/1.1 200 OK") == sum(one.method != "CONNECT" for one in requests), data
    for one in seen:  # an engine sees exactly this request when a router forwards it
        engine = RequestParser(2000, 64)
        headers = {"host": "e", **forwarded_headers(one)}
        engine.feed(request_bytes(one.method, one.head.target, one.body, headers))
        assert [key(request) for request in engine.requests] == [key(one)], data
        assert not engine.begun
    return len(seen)


def check_answer(draw: random.Random) -> bool:
    """Check one mutated answer; return whether it is complete."""
    data = mutate(draw, ANSWERS)
    found = []
    for parts in ([data], pieces(draw, data)):
        parser = AnswerParser()
        valid = True
        try:
            for part in parts:
                if parser.complete:
                    parser.surplus = True
                    break
                parser.feed(part)
        except MalformedMessage:
            valid = parser.complete  # else what follows is the error of a surplus
        found.append((parser.head, valid and bytes(parser.body), parser.complete))
    assert found[0] == found[1] or not found[0][1], data
    return found[0][2]


async def check_many(count: int, seed: int) -> tuple[int, int]:
    """Check mutated messages; return how many requests and complete answers they contain."""
    draw = random.Random(seed)
    sources = tuple(case.data for case in CASES)
    requests = answers = 0
    for number in range(count):
        if number % 4:
            requests += await check_request(draw, sources)
        else:
            answers += check_answer(draw)
    return requests, answers

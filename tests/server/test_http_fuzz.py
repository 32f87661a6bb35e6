"""Malformed HTTP crashes nothing, hangs nothing, and is one request at most for every request that is answered."""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from server.ambiguous import CASES
from server.http_fuzz import check_many, key, mutate
from server.router_scene import Scene, play
from server.test_ambiguous import POLLED, exchange
from understudy.http.parsing import MalformedMessage, RequestParser

if TYPE_CHECKING:
    from understudy.http import Connection, Request


def test_malformed_messages_are_read_in_one_way_however_they_are_cut() -> None:
    requests, answers = asyncio.run(check_many(3000, 1))
    assert requests > 200
    assert answers > 50


@pytest.mark.parametrize("beginning", [b"GET /", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nx: "])
def test_a_line_that_never_ends_is_refused(beginning: bytes) -> None:
    parser = RequestParser(2000, 64)
    for part in [beginning, *[b"x" * 1000] * 4190]:
        parser.feed(part)
    with pytest.raises(MalformedMessage, match="headers larger than 4194304 bytes"):
        parser.feed(b"x" * 100_000)


@pytest.mark.soak
def test_many_malformed_messages_are_read_in_one_way() -> None:
    count = int(os.environ.get("UNDERSTUDY_FUZZ", "100000"))
    requests, answers = asyncio.run(check_many(count, int(os.environ.get("UNDERSTUDY_FUZZ_SEED", "7"))))
    assert requests > count // 15
    assert answers > count // 60


def test_an_engine_sees_exactly_the_requests_that_its_router_accepts() -> None:
    async def test(scene: Scene) -> None:
        accepted: Counter[tuple[str, str, bytes]] = Counter()
        seen: Counter[tuple[str, str, bytes]] = Counter()
        proxy, app = scene.service.proxy, scene.servers[0].app
        handle, handle_in_engine = proxy._pass_on, app.handle

        async def accept(request: Request, connection: Connection) -> None:
            accepted[key(request)] += 1
            await handle(request, connection)

        def see(request: Request, connection: Connection) -> None:
            if request.path not in POLLED:
                seen[key(request)] += 1
            handle_in_engine(request, connection)

        proxy._pass_on = accept  # type: ignore[method-assign]
        app.handle = see  # type: ignore[method-assign]
        draw = random.Random(5)
        sources = tuple(case.data for case in CASES)
        last = b"\r\n\r\nGET /v1/last HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"
        for _ in range(40):
            batch = [mutate(draw, sources) + last * 3 + b"\0" * 40 for _ in range(10)]
            for port in (scene.client.port, scene.servers[0].port):
                answers = await asyncio.gather(*(exchange(port, data) for data in batch))
                assert all(answer.startswith(b"HTTP/1.1 ") for answer in answers)
                if port == scene.client.port:
                    assert seen == accepted
                seen.clear()
                accepted.clear()
        assert (await scene.client.get("/v1/models")).status == 200

    play(test, 1, "round_robin", look_every_s=60.0)

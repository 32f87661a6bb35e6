"""What one client sends through a standalone router concerns nobody else, and answers end where they end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from server.client import Client, Reply, parse_reply
from server.raw_engine import OWN_QUESTIONS
from server.router_scene import C, Scene, play
from understudy.proxy.address import WorkerAddress
from understudy.proxy.service import RouterService, RouterSettings
from understudy.proxy.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import Callable

BODY = {"prompt": "x", "max_tokens": 1}


class Engine:
    """Answers what it is told to, and is well as long as it listens."""

    def __init__(
        self, answer: Callable[[bytes], bytes], *, ends: bool = False, dies_of: bytes | None = None
    ) -> None:
        self.asked: list[bytes] = []
        self.port = 0
        self._dies_of = dies_of
        self._server: asyncio.Server | None = None
        self._answer = answer
        self._ends = ends

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._server = server
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                line = head.partition(b"\r\n")[0]
                if line.startswith(b"GET /health "):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                elif line.startswith(OWN_QUESTIONS):
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                else:
                    self.asked.append(line)
                    if self._dies_of is not None and self._dies_of in line and self._server is not None:
                        self._server.close()
                        return
                    told = self._answer(line)
                    writer.write(told)
                    if self._ends or not told:
                        return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()


async def before(*engines: Engine, routing: str = "round_robin") -> tuple[AsyncExitStack, RouterService]:
    """A router before such engines; the stack ends all of them."""
    stack = AsyncExitStack()
    for engine in engines:
        server = await engine.start()
        stack.callback(server.close)
    addresses = tuple(WorkerAddress(url=f"http://127.0.0.1:{engine.port}") for engine in engines)
    settings = RouterSettings(workers=addresses, routing=routing, port=0, block_size=16, look_every_s=60.0)
    service = RouterService(settings)
    await service.start()
    stack.push_async_callback(service.stop)
    return stack, service


def test_the_target_is_passed_on_as_it_came() -> None:
    evil = quote(" HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\nGET /v1/models HTTP/1.1\r\nx: ", safe="")

    async def test(told: Scene) -> None:
        version = (await told.client.get("/version")).body
        assert (await told.client.get(f"/version{evil}")).status == 404
        for _ in range(3):
            assert (await told.client.get("/version")).body == version
        assert (await told.client.post(C, BODY)).status == 200
        assert (await told.client.get("/ver%73ion")).body == version
        assert (await told.client.get("/version%3Fa=1")).status == 404
        assert (await told.client.get("http://elsewhere/version?a=%20")).body == version
        assert (await told.client.post("/v1/comple%74ions?a=1", BODY)).status == 200

    play(test, 1, "round_robin")


@pytest.mark.parametrize("byte", [b"\x00", b"\t", b"\n", b"\r", b"\x7f"])
def test_a_target_with_a_control_character_is_refused(byte: bytes) -> None:
    async def test(told: Scene) -> None:
        for port in (told.client.port, told.servers[0].port):
            data = b"GET /version%b HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n" % byte
            assert (await Client(port).raw(data)).status == 400

    play(test, 1, "round_robin")


def test_who_is_not_answered_by_an_engine_that_is_well_takes_nobody_along() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    engines = [Engine(lambda line: b"" if b"bad" in line else whole) for _ in range(3)]

    async def main() -> None:
        stack, service = await before(*engines)
        async with stack:
            client = Client(service.port)
            assert (await client.post(C, BODY)).body == b"ok"  # its connection is kept, and used again
            for path in (f"{C}?bad", "/tokenize?bad"):
                replies = [await client.post(path, BODY) for _ in range(4)]
                assert [reply.status for reply in replies] == [502] * 4
            assert [worker.up for worker in service.workers.all] == [True] * 3
            assert sum(b"bad" in line for engine in engines for line in engine.asked) == 8
            assert service.proxy.counts["retried"] == 0
            assert [(await client.post(C, BODY)).status for _ in range(3)] == [200] * 3

    asyncio.run(main())


@pytest.mark.parametrize("used", [False, True])
def test_a_request_that_an_engine_dies_of_goes_to_no_other(used: bool) -> None:
    """Nor where it went over a connection that was used before, and another one cannot be had."""
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    engines = [Engine(lambda line: whole, dies_of=b"poison") for _ in range(3)]  # noqa: ARG005

    async def main() -> None:
        stack, service = await before(*engines)
        async with stack:
            client = Client(service.port)
            if not used:
                for worker in service.workers.all:
                    worker.upstream.close()
            reply = await client.post(f"{C}?poison", BODY)
            assert (reply.status, reply.json["error"]["type"]) == (502, "Bad Gateway"), reply.body
            assert sum(b"poison" in line for engine in engines for line in engine.asked) == 1
            assert [worker.up for worker in service.workers.all].count(True) == 2
            assert service.proxy.counts["retried"] == 0
            assert [(await client.post(C, BODY)).status for _ in range(4)] == [200] * 4

    asyncio.run(main())


def test_an_engine_that_has_failed_is_left_out_as_soon_as_it_says_so() -> None:
    async def test(told: Scene) -> None:
        told.servers[1].app.dead = True

        async def down() -> bool:
            assert (await told.client.post(C, BODY)).status in (200, 500)
            return not told.service.workers.all[1].up

        await told.until(down)
        assert [(await told.client.post(C, BODY)).status for _ in range(4)] == [200] * 4

    play(test, 2, "round_robin", look_every_s=1000.0)


def test_an_engine_that_breaks_off_one_answer_stays_up() -> None:
    async def main() -> None:
        engine = Engine(lambda line: b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\nhalf", ends=True)  # noqa: ARG005
        stack, service = await before(engine)
        async with stack:
            for path in (C, "/tokenize"):
                assert (await Client(service.port).post(path, BODY)).status == 502
                assert service.workers.all[0].up

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/version", "/v1/models", C, "/nope"])
def test_the_head_of_an_answer_is_all_that_head_asks_for(path: str) -> None:
    async def test(told: Scene) -> None:
        direct = await _head(told.servers[0].port, path)
        assert await _head(told.client.port, path) == direct
        assert (await told.client.get("/version")).status == 200

    play(test, 1, "round_robin")


async def _head(port: int, path: str) -> tuple[int, bytes, dict[str, str]]:
    reply: Reply = await asyncio.wait_for(Client(port).ask("HEAD", path), 5)
    named = ("content-length", "content-type", "allow")
    return reply.status, reply.body, {name: reply.headers[name] for name in named if name in reply.headers}


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body_end_with_their_head(status: int) -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    answer = early + b"HTTP/1.1 %d None\r\ncontent-length: 9\r\n\r\n" % status

    async def main() -> None:
        engine = Engine(
            lambda line: answer if b"none" in line else b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
        )
        stack, service = await before(engine)
        async with stack:
            client = Client(service.port)
            for method, path in (("GET", "/none"), ("POST", f"{C}?none")):
                reply = await asyncio.wait_for(client.ask(method, path, BODY), 5)
                assert (reply.status, reply.body) == (status, b"")
                assert "content-length" not in reply.headers
            assert (await client.post(C, BODY)).body == b"ok"

    asyncio.run(main())


def test_headers_behind_the_body_of_an_answer_belong_to_it() -> None:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"

    async def main() -> None:
        engine = Engine(lambda line: head + b"2\r\nok\r\n0\r\nx-sum: 1\r\nx-other: 2\r\n\r\n")  # noqa: ARG005
        stack, service = await before(engine)
        async with stack:
            for _ in range(3):
                reply = await Client(service.port).post(C, BODY)
                assert (reply.status, reply.body) == (200, b"ok")
            assert len(engine.asked) == 3

    asyncio.run(main())


def test_a_refusal_of_a_status_without_a_body_has_none() -> None:
    async def test(told: Scene) -> None:
        server = told.servers[0]
        assert (
            await Client(server.port).post("/admin/fault", {"kind": "reject", "status": 204})
        ).status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        ask = b"POST %b HTTP/1.1\r\nhost: t\r\ncontent-length: 0\r\n\r\n" % C.encode()
        last = b"GET /version HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"
        writer.write(ask)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 204 ")
        writer.write(last)
        assert parse_reply(await asyncio.wait_for(reader.read(), 5)).status == 200
        writer.close()

    play(test, 1, "round_robin")


@pytest.mark.parametrize("url", ["http://[::1", "\x00", "http://a\x00b", "x" * 5000, "http://a b", "a\r\nb"])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    async def test(told: Scene) -> None:
        assert (await told.client.post("/register", {"url": url})).status == 400
        assert (await told.client.post("/unregister", {"url": url})).status in (400, 404)
        assert (await told.client.post("/unregister", b'{"url":"http://a\\ud800"}')).status == 400

    play(test, 1, "round_robin")


def test_an_answer_over_a_connection_that_was_closed_meanwhile_is_asked_for_once_more() -> None:
    async def main() -> None:
        engine = Engine(lambda line: b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")  # noqa: ARG005
        server = await engine.start()
        upstream = Upstream(f"http://127.0.0.1:{engine.port}")
        assert await upstream.get("/a") == (200, b"ok")
        upstream._idle[0].close()
        assert await upstream.get("/b") == (200, b"ok")
        upstream.close()
        server.close()

    asyncio.run(main())


def test_an_engine_whose_events_cannot_be_followed_leaves_nothing_behind() -> None:
    async def main() -> None:
        engines = [Engine(lambda line: b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok") for _ in range(3)]  # noqa: ARG005
        stack, service = await before(*engines[:1], routing="kv")
        async with stack:
            client = Client(service.port)
            for engine in engines[1:]:
                stack.callback((await engine.start()).close)
                url = f"http://127.0.0.1:{engine.port}"
                for events in ("junk", "tcp://*:5"):
                    refused = await client.post("/register", {"url": url, "events": events})
                    assert (refused.status, "subscribe" in refused.body.decode()) == (400, True)
            urls = [f"http://127.0.0.1:{engine.port}" for engine in engines[1:]]
            replies = await asyncio.gather(*(client.post("/register", {"url": url}) for url in urls * 2))
            assert sorted(reply.status for reply in replies) == [200, 200, 400, 400]
            assert [rank.number for rank in service.workers.ranks] == [0, 1, 2]
            replies = await asyncio.gather(
                *(client.post(C, {"prompt": [i], "max_tokens": 1}) for i in range(30))
            )
            assert {reply.status for reply in replies} == {200}
            assert all(engine.asked for engine in engines)

    asyncio.run(main())

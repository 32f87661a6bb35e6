"""Servers that stop without a drain: every answer ends, with an error."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest

from server.client import QUICK, Client, parse_reply, serving
from server.router_scene import scene
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.router.kv import KvRouting
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from server.client import Reply

C = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000, "model": "stub"}
ERROR = {"message": "the server is shutting down", "type": "Service Unavailable", "param": None, "code": 503}


def assert_ended(stream: Reply) -> None:
    """A stream that began, and whose last events are the error and the end."""
    assert stream.status == 200
    *begun, error, done = stream.events
    assert begun
    assert error == {"error": ERROR}
    assert done == "[DONE]"


async def begin(port: int, body: dict[str, Any], path: str = C) -> asyncio.Task[Reply]:
    """A stream whose first event has come; the result is the whole of it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({**body, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    first = await asyncio.wait_for(reader.readuntil(b"data: "), 30)

    async def rest() -> Reply:
        found = first + await asyncio.wait_for(reader.read(), 60)
        assert found.endswith(b"0\r\n\r\n")  # the end of a chunked body, not of the connection alone
        writer.close()
        return parse_reply(found)

    return asyncio.create_task(rest())


async def lines_of(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    assert process.stderr is not None
    while line := await asyncio.wait_for(process.stderr.readline(), 120):
        yield line.decode()


@pytest.mark.parametrize("verb", ["serve", "fleet", "fleet --processes 2", "router"])
def test_sigterm_ends_streams_and_whole_answers_with_an_error(verb: str) -> None:
    async def start(*words: str) -> tuple[asyncio.subprocess.Process, int]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "understudy", *words, "--port", "0", stderr=asyncio.subprocess.PIPE
        )
        async for line in lines_of(process):
            if found := re.search(r"on http://127\.0\.0\.1:(\d+)", line):
                return process, int(found[1])
        raise AssertionError(f"{words} ended with {await process.wait()}")

    async def stop(process: asyncio.subprocess.Process) -> None:
        os.kill(process.pid, signal.SIGTERM)
        said = "".join([line async for line in lines_of(process)])
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert "Traceback" not in said

    async def main() -> None:
        flags = ["--inter-token-latency", "20"]
        if verb.startswith("fleet"):
            flags += ["--workers", "2", "--base-port", "0"]
        engine = None
        if verb == "router":
            engine, port = await start("serve", "stub", *flags)
            flags = ["--workers", f"http://127.0.0.1:{port}", "--routing", "round_robin"]
        process, port = await start(*verb.split(), *([] if engine else ["stub"]), *flags)
        stream = await begin(port, LONG)
        chat = await begin(port, CHAT, "/v1/chat/completions")
        whole = asyncio.create_task(Client(port).post(C, LONG))
        await asyncio.sleep(0.3)
        await stop(process)
        assert_ended(await stream)
        assert_ended(await chat)
        assert ((await whole).status, (await whole).json) == (503, {"error": ERROR})
        if engine is not None:
            await stop(engine)

    asyncio.run(main())


def test_requests_that_no_engine_has_yet_get_an_error_too() -> None:
    async def main() -> None:
        async with serving(dev_mode=True, latency_ms=(1.0, 50.0)) as (client, server):
            stream = await begin(client.port, LONG)
            pause = asyncio.create_task(client.post("/pause?mode=wait", None))
            await client.post("/admin/fault", {"kind": "delay", "delay_ms": 1000})
            held = asyncio.create_task(client.post(C, LONG))
            while len(server.app.answering) < 3:
                await asyncio.sleep(0.01)
            await server.stop()
            assert_ended(await stream)
            for waiting in (pause, held):
                assert ((await waiting).status, (await waiting).json) == (503, {"error": ERROR})
            await asyncio.sleep(1.0)  # when the delayed request would be handled
            assert not server.app.answering

    asyncio.run(main())


def test_requests_in_the_queue_of_a_fleets_router_get_an_error() -> None:
    async def main() -> None:
        pool = ServerSettings(model="stub", engine=QUICK, max_model_len=4096, latency_ms=(30_000.0, 50.0))
        routing = KvRouting(queue_threshold=0.01)
        fleet = Fleet(FleetSettings(pools=((1, pool),), base_port=0, port=0, routing=routing))
        await fleet.start()
        client = Client(fleet.port)
        body = {"prompt": list(range(2000)), "max_tokens": 8}
        asked = [asyncio.create_task(client.post(C, body)) for _ in range(3)]
        while fleet.routing.dispatcher.num_waiting < 2:
            await asyncio.sleep(0.01)
        await fleet.stop()
        fleet.runtime.driver.stop()
        assert [(await one).status for one in asked] == [503] * 3

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_streams_of_other_styles_end_too(path: str) -> None:
    async def main() -> None:
        async with serving(latency_ms=(1.0, 50.0)) as (client, server):
            body = {**CHAT, "input": "hi"} if path == "/v1/responses" else CHAT
            stream = await begin(client.port, body, path)
            await server.stop()
            assert_ended(await stream)

    asyncio.run(main())


def test_a_stream_that_ends_as_the_router_stops_frees_its_engine() -> None:
    async def main() -> None:
        async with scene(1, "round_robin") as told:
            stream = await begin(told.service.port, LONG)
            await told.service.stop()
            assert_ended(await stream)
            while told.servers[0].worker.live():
                await asyncio.sleep(0.01)

    asyncio.run(main())

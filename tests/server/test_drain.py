"""A router and a fleet that stop: who is being answered is, who comes is not."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from server.client import parse_reply, serving
from understudy.cli.fleet import read_fleet
from understudy.fleets.spread import SpreadFleet
from understudy.proxy.address import WorkerAddress
from understudy.proxy.service import RouterService, RouterSettings
from understudy.proxy.upstream import Answer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


C = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}


def asked(body: dict[str, Any], *, stays: bool = False) -> bytes:
    data = json.dumps(body).encode()
    lines = (
        f"POST {C} HTTP/1.1",
        "host: t",
        "content-type: application/json",
        f"content-length: {len(data)}",
    )
    return "\r\n".join((*lines, *(() if stays else ("connection: close",)), "\r\n")).encode() + data


async def streaming(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """A stream that has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(asked(BODY))
    return reader, writer, await reader.readuntil(b"data: ")


@pytest.mark.parametrize("told", ["front", "all"])
def test_a_fleet_over_processes_lets_streams_end_as_long_as_it_was_told(told: str) -> None:
    line = ["stub", "--workers", "2", "--processes", "2", "--base-port", "0", "--port", "0"]
    times = ["--time-to-first-token", "1", "--inter-token-latency", "3", "--shutdown-timeout", "60"]
    settings, processes = read_fleet([*line, *times])

    async def main() -> None:
        fleet = SpreadFleet(settings, processes)
        await fleet.start()
        reader, writer, begun = await streaming(fleet.port)
        if told == "all":  # as systemd does
            for child, _ in fleet._children:
                child.terminate()
        await fleet.stop()
        events = parse_reply(begun + await reader.read()).events
        writer.close()
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"

    asyncio.run(main())


async def routing_to(port: int) -> RouterService:
    engine = WorkerAddress(url=f"http://127.0.0.1:{port}")
    service = RouterService(
        RouterSettings(workers=(engine,), routing="round_robin", port=0, awaits_workers=True)
    )
    await service.start()
    return service


def test_a_router_that_drains_takes_nothing_new() -> None:
    async def main() -> None:
        async with serving() as (_, server):
            service = await routing_to(server.port)
            late_reader, late = await asyncio.open_connection("127.0.0.1", service.port)
            late.write(asked({**BODY, "stream": False, "max_tokens": 1}, stays=True))
            await late_reader.readuntil(b"\r\n\r\n{")
            reader, writer, begun = await streaming(service.port)
            stopped = asyncio.create_task(service.stop(60.0))
            await asyncio.sleep(0)
            late.write(asked(BODY))
            assert b"HTTP/1.1 503 " in await late_reader.read()
            assert parse_reply(begun + await reader.read()).events[-1] == "[DONE]"
            await asyncio.wait_for(stopped, 30)
            writer.close()
            late.close()

    asyncio.run(main())


class Broken:
    """A socket whose other end has gone."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, _: bytes) -> int:
        raise BrokenPipeError


def test_a_client_that_has_gone_is_told_no_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio warns of each write but the first ones to a connection that is lost."""
    told: list[int] = []

    async def main() -> None:
        async with serving() as (_, server):
            service = await routing_to(server.port)

            async def parts(_: Answer) -> AsyncIterator[bytes]:
                for connection in service._outbox.open:
                    transport: Any = connection._transport
                    transport._sock = Broken(transport._sock)
                for number in range(50):  # all of them have come already
                    told.append(number)
                    yield b"data: x\n\n"

            monkeypatch.setattr(Answer, "chunks", parts)
            reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
            writer.write(asked({**BODY, "max_tokens": 1}))
            await reader.read()
            writer.close()
            await service.stop()

    asyncio.run(main())
    assert len(told) < 5
    assert "socket.send() raised exception" not in caplog.text

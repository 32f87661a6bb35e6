"""Engines that stop sending: the router's time limits."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from server.raw_engine import BODY, routed
from server.router_scene import C
from understudy.cli import main


async def _silent(line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    if b"?n=head" in line:
        writer.write(b"HTTP/1.1 200 OK\r\n")
    if b"?n=whole" in line:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
    if b"?n=first" in line:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
    if b"?n=stream" in line:
        kind = b"content-type: text/event-stream\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n%btransfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n" % kind)
    if b"?n=plain" in line:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n")
    await reader.read()  # until the router has gone
    return False


@pytest.mark.parametrize("place", ["nothing", "head", "whole"])
def test_an_engine_that_stops_before_its_answer_is_whole_gets_504_for_its_client(place: str) -> None:
    async def main() -> None:
        async with routed(_silent, first_byte_timeout_s=0.1, stall_timeout_s=0.05) as (client, _, (engine,)):
            for path in (C, "/other"):
                reply = await client.post(f"{path}?n={place}", BODY)
                told = reply.json["error"]
                assert (reply.status, told["code"]) == (504, 504)
                flag = "--stall-timeout-s" if place == "whole" else "--first-byte-timeout-s"
                assert flag in told["message"]
            assert len(engine.asked) == 2

    asyncio.run(main())


@pytest.mark.parametrize("place", ["first", "stream"])
def test_a_stream_that_stops_ends_with_an_error(place: str) -> None:
    async def main() -> None:
        async with routed(_silent, first_byte_timeout_s=0.1, stall_timeout_s=0.05) as (client, _, _):
            reply = await client.post(f"{C}?n={place}", BODY)
            *before, error, done = reply.events
            assert before == ([1] if place == "stream" else [])
            assert (reply.status, error["error"]["code"], done) == (200, 504, "[DONE]")

    asyncio.run(main())


def test_an_answer_in_chunks_that_is_no_event_stream_is_cut_where_it_stops() -> None:
    async def main() -> None:
        async with routed(_silent, stall_timeout_s=0.05) as (client, _, _):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
            writer.write(f"POST {C}?n=plain HTTP/1.1\r\nhost: t\r\ncontent-length: 2\r\n\r\n{{}}".encode())
            told = b""
            with suppress(ConnectionError):
                while part := await asyncio.wait_for(reader.read(4096), 10):
                    told += part
            assert told.endswith(b"half\r\n")
            writer.close()

    asyncio.run(main())


def test_the_limit_is_on_silence_and_not_on_the_length_of_an_answer() -> None:
    async def act(line: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for _ in range(12):
            writer.write(b"9\r\ndata: 1\n\n\r\n")
            await asyncio.sleep(0.05)
        writer.write(b"0\r\n\r\n")
        return True

    async def main() -> None:
        async with routed(act, first_byte_timeout_s=0.4, stall_timeout_s=0.4) as (client, _, _):
            assert (await client.post(C, BODY)).events == [1] * 12
        async with routed(act, first_byte_timeout_s=0.0, stall_timeout_s=0.0) as (client, _, _):
            assert (await client.post(C, BODY)).events == [1] * 12  # 0: no limit

    asyncio.run(main())


@pytest.mark.parametrize(
    "flag",
    [
        *("--first-byte-timeout-s=-1", "--stall-timeout-s=nan", "--stall-timeout-s=-1"),
        *("--max-request-body-size-mb=0", "--max-request-body-depth=0"),
    ],
)
def test_limits_of_the_router_that_are_none_are_refused(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", flag]) == 2
    assert flag.partition("=")[0] in capsys.readouterr().err

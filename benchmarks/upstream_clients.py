"""Router's client of engines against aiohttp: requests a second and CPU time per request.

    python benchmarks/upstream_clients.py [--requests 4000] [--at-once 32] [--rounds 5]

An engine in a process of its own answers every request at once, with a body of 600 bytes or a stream of 32 events.
The clients alternate. aiohttp is optional; without it only ours is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from typing import TYPE_CHECKING, Any

from harness.publish import add_json_flag, publish
from understudy.proxy.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from multiprocessing.connection import Connection as Pipe

BODY = b'{"prompt":"' + b"x" * 2000 + b'","max_tokens":32}'
EVENT = b"data: " + b"y" * 180 + b"\n\n"
HEADERS = {"content-type": "application/json", "authorization": "Bearer k", "x-request-id": "r"}


def engine(pipe: Pipe) -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 600\r\n\r\n" + b"z" * 600
    chunk = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
    stream = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                if b" /stream " not in head:
                    writer.write(whole)
                    continue
                writer.write(stream)
                for _ in range(32):
                    writer.write(chunk)
                    await asyncio.sleep(0)
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await asyncio.sleep(3600)

    asyncio.run(main())


async def ours(port: int, load: Callable[[Callable[[str], Awaitable[int]]], Awaitable[float]]) -> float:
    upstream = Upstream(f"http://127.0.0.1:{port}")

    async def ask(path: str) -> int:
        answer = await upstream.ask("POST", path, BODY, HEADERS)
        return sum([len(part) async for part in answer.chunks()])

    try:
        return await load(ask)
    finally:
        upstream.close()


async def aiohttps(port: int, load: Callable[[Callable[[str], Awaitable[int]]], Awaitable[float]]) -> float:
    import aiohttp

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    options: dict[str, Any] = {"auto_decompress": False, "max_line_size": 1 << 18, "max_field_size": 1 << 18}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, **options) as session:

        async def ask(path: str) -> int:
            url = f"http://127.0.0.1:{port}{path}"
            async with session.post(url, data=BODY, headers=HEADERS) as answer:
                return sum([len(part) async for part in answer.content.iter_any()])

        return await load(ask)


async def measure(client: Any, port: int, path: str, count: int, at_once: int) -> tuple[float, float]:
    """Return requests a second, and CPU microseconds per request."""
    wall_s = 0.0

    async def load(ask: Callable[[str], Awaitable[int]]) -> float:
        expected = 600 if path == "/whole" else 32 * len(EVENT)
        await ask(path)
        left = count

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                assert await ask(path) == expected

        began, cpu = time.perf_counter(), time.process_time()
        await asyncio.gather(*(work() for _ in range(at_once)))
        nonlocal wall_s
        wall_s = time.perf_counter() - began
        return time.process_time() - cpu

    cpu_s: float = await client(port, load)
    return count / wall_s, cpu_s / count * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    add_json_flag(parser)
    args = parser.parse_args()
    clients, peers = {"ours, on httptools": ours}, []
    try:
        import aiohttp

        clients["aiohttp"] = aiohttps
        peers.append(f"aiohttp {aiohttp.__version__}")
    except ImportError:
        print("aiohttp is not installed; only ours is measured")
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=engine, args=(there,), daemon=True)
    process.start()
    port = here.recv()
    measured: dict[str, dict[str, float]] = {}
    for path, answers in (("/whole", "whole, 600 bytes"), ("/stream", "stream of 32 events")):
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
        for _ in range(args.rounds):
            for name, client in clients.items():
                found[name].append(asyncio.run(measure(client, port, path, args.requests, args.at_once)))
        for name, rows in found.items():
            rate, cpu_us = (statistics.median(column) for column in zip(*rows, strict=True))
            measured[f"{answers}: {name}"] = {"rate": round(rate), "CPU per request": round(cpu_us)}
    process.terminate()
    publish("upstream_clients", measured, args.json, peers=peers)


if __name__ == "__main__":
    main()

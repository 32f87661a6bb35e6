"""No byte of an ambiguous request becomes a request of its own, at a server or at an engine behind a router."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from server.ambiguous import CASES
from server.client import Client
from server.router_scene import Scene, play

if TYPE_CHECKING:
    from understudy.http import Connection, Request

Seen = list[tuple[str, str, bytes]]
POLLED = ("/health", "/metrics", "/version", "/server_info")


def record(scene: Scene) -> Seen:
    """Requests that reach the engine, without the router's own."""
    seen: Seen = []

    def see(request: Request, _: Connection) -> bool:
        if request.path not in POLLED:
            seen.append((request.method, request.path, request.body))
        return False

    scene.servers[0].app.before.append(see)
    return seen


async def exchange(port: int, data: bytes) -> bytes:
    """Send bytes; return everything until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answers = b""
    try:
        while part := await asyncio.wait_for(reader.read(65536), 10):
            answers += part
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return answers


def test_an_ambiguous_request_is_refused_or_read_in_one_way() -> None:
    assert len({case.data for case in CASES}) >= 77

    async def test(scene: Scene) -> None:
        seen = record(scene)
        for case in CASES:
            for port in (scene.servers[0].port, scene.client.port):
                answers = await exchange(port, case.data)
                assert tuple(seen) == case.seen, (case.data, port)
                assert answers.count(b"\r\ndate: ") == max(len(case.seen), 1), (case.data, answers)
                if not case.seen:
                    assert answers.startswith(b"HTTP/1.1 400 "), (case.data, answers)
                seen.clear()
        for client in (scene.client, Client(scene.servers[0].port)):
            assert (await client.get("/v1/models")).status == 200

    play(test, 1, "round_robin", look_every_s=60.0)

"""A router and our own servers behind it, for tests."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from server.client import Client, serving
from understudy.proxy.address import WorkerAddress
from understudy.proxy.service import RouterService, RouterSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from understudy.server.server import Server

C = "/v1/completions"
EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}


class Scene:
    """A router and the servers behind it."""

    def __init__(self, service: RouterService, servers: list[Server]) -> None:
        self.service = service
        self.servers = servers
        self.client = Client(service.port)

    async def dump(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get("/dump?blocks=1")).json
        return found

    async def held(self, worker: int) -> set[int]:
        return set((await self.dump())["workers"][worker]["device_hashes"])

    async def states(self) -> list[str]:
        return [row["view"]["state"] for row in (await self.dump())["workers"]]

    async def joined(self) -> int:
        """Send prompts until events of the first worker are heard as they are sent; returns of how many blocks.

        A follower asks for what was said before it came, and hears nothing live until it is connected: what is lost
        before that is not lost on the way.
        """
        sent = 0

        async def heard() -> bool:
            nonlocal sent
            sent += 1
            start = 1000 + 160 * sent
            await self.client.post(C, {"prompt": list(range(start, start + 160)), "max_tokens": 1})
            return bool((await self.dump())["workers"][0]["view"].get("messages"))

        await self.until(heard)
        return 10 * sent

    async def until(self, done: Callable[[], Any], seconds: float = 10.0) -> None:
        """Wait for something that other threads bring about."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not await done():
            assert asyncio.get_running_loop().time() < deadline, await self.dump()
            await asyncio.sleep(0.02)


@asynccontextmanager
async def scene(
    count: int, routing: Any = "kv", *, events: Any = EVENTS, server: Any = None, **settings: Any
) -> AsyncIterator[Scene]:
    """Start servers (with the settings `server`) and a router (with the others)."""
    async with AsyncExitStack() as stack:
        servers = []
        for _ in range(count):
            _, one = await stack.enter_async_context(serving(kv_events_config=events, **(server or {})))
            servers.append(one)
        addresses = tuple(WorkerAddress(url=f"http://127.0.0.1:{one.port}") for one in servers)
        # Events of a busy machine may be late: only a test of silence waits for it.
        given = {"silence_s": 60.0, "look_every_s": 0.05, **settings}
        service = RouterService(RouterSettings(workers=addresses, routing=routing, port=0, **given))
        await service.start()
        try:
            yield Scene(service, servers)
        finally:
            await service.stop()


def play(test: Any, *args: Any, **settings: Any) -> None:
    async def main() -> None:
        async with scene(*args, **settings) as told:
            await test(told)

    asyncio.run(main())

"""A live fleet of small workers for tests."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from server.client import QUICK, Client
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from understudy.router import KvRouting, Router
    from understudy.run.autoscale import Autoscale
    from understudy.run.faults import FaultPlan


C = "/v1/completions"


@asynccontextmanager
async def fleet_of(
    count: int,
    routing: str | KvRouting | Router = "round_robin",
    *,
    faults: FaultPlan | None = None,
    autoscale: Autoscale | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[Client, Fleet]]:
    pool = ServerSettings(**{"model": "stub", "engine": QUICK, "max_model_len": 4096, **settings})
    fleet = Fleet(
        FleetSettings(
            pools=((count, pool),), base_port=0, port=0, routing=routing, faults=faults, autoscale=autoscale
        )
    )
    await fleet.start()
    try:
        yield Client(fleet.port), fleet
    finally:
        await fleet.stop()
        fleet.runtime.driver.stop()


def run(test: Any, *args: Any, **settings: Any) -> None:
    async def main() -> None:
        async with fleet_of(*args, **settings) as (client, fleet):
            await test(client, fleet)

    asyncio.run(main())


async def vanish(client: Client, body: Any, after_s: float) -> None:
    """Ask, and go away before the answer."""
    _reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    data = msgspec.json.encode(body)
    head = f"POST {C} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await asyncio.sleep(after_s)
    writer.close()


def served(fleet: Fleet) -> list[float]:
    return [server.worker.metrics[0].generation_tokens.value for server in fleet.servers]

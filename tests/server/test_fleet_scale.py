"""A live fleet whose workers drain, stop and start by order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.client import Client
from server.fleet_scene import C, run, served

if TYPE_CHECKING:
    from understudy.fleets.fleet import Fleet

SHORT = {"prompt": "x", "max_tokens": 2}


async def scale(client: Client, **order: Any) -> Any:
    answer = await client.post("/admin/scale", order)
    assert answer.status == 200, answer.json
    return answer.json


async def states(client: Client) -> list[str]:
    found: list[str] = (await client.get("/fleet/state")).json["workers"]["state"]
    return found


async def become(client: Client, wanted: list[str]) -> None:
    for _ in range(200):
        if await states(client) == wanted:
            return
        await asyncio.sleep(0.02)
    assert await states(client) == wanted


def test_a_worker_that_leaves_ends_its_requests_and_gets_no_other() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        long = [asyncio.create_task(client.post(C, {"prompt": "x", "max_tokens": 300})) for _ in range(2)]
        while not all(server.worker.live() for server in fleet.servers):
            await asyncio.sleep(0.01)
        told = await scale(client, workers=1)
        assert told == {"workers": 1, "started": [], "draining": [1]}
        assert await states(client) == ["ready", "draining"]
        before = served(fleet)[1]
        for _ in range(4):
            assert (await client.post(C, SHORT)).status == 200
        assert [(await one).status for one in long] == [200, 200]
        await become(client, ["ready", "stopped"])
        assert served(fleet)[1] >= before
        gone = Client(fleet.servers[1].port)
        refused = await gone.post(C, SHORT)
        assert (refused.status, "has stopped" in refused.json["error"]["message"]) == (503, True)
        assert (await gone.get("/health")).status == 503
        assert fleet.servers[1].worker.cores[0].vllm.pool[2] == 0  # cached blocks
        assert (await client.get("/admin/scale")).json == {
            "pools": [{"workers": 1, "draining": 0, "stopped": 1}]
        }

    run(test, 2)


def test_a_worker_that_starts_serves_after_its_start_up() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        await scale(client, workers=1)
        await become(client, ["ready", "stopped"])
        assert (await scale(client, workers=2, startup_s=0.3))["started"] == [1]
        assert await states(client) == ["ready", "starting"]
        for _ in range(3):
            assert (await client.post(C, SHORT)).status == 200
        assert served(fleet)[1] == 0
        await become(client, ["ready", "ready"])
        for _ in range(4):
            assert (await client.post(C, SHORT)).status == 200
        assert served(fleet)[1] > 0

    run(test, 2)


def test_a_worker_that_still_drains_goes_on_serving_with_its_cache() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        long = asyncio.create_task(client.post(C, {"prompt": "x", "max_tokens": 3000}))
        while not fleet.servers[0].worker.live():
            await asyncio.sleep(0.01)
        assert (await scale(client, workers=0))["draining"] == [0]
        assert (await client.post(C, SHORT)).status == 503
        assert (await scale(client, workers=1, startup_s=60))["started"] == [0]
        assert (await client.post(C, SHORT)).status == 200
        long.cancel()

    run(test, 1)


@pytest.mark.parametrize(
    ("order", "why"),
    [
        ({"workers": 3}, "workers must be from 0 to 2"),
        ({"workers": 1, "pool": 1}, "there is no pool 1"),
        ({"workers": 1, "startup_s": -1}, "startup_s must be a time from 0"),
        ({"count": 1}, "count"),
        ({}, "workers"),
    ],
)
def test_an_order_that_cannot_be_followed_changes_nothing(order: dict[str, Any], why: str) -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        refused = await client.post("/admin/scale", order)
        assert refused.status == 400
        assert why in refused.json["error"]["message"]
        assert await states(client) == ["ready", "ready"]

    run(test, 2)

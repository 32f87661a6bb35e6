"""Faults that are listed, last for a time, and end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from server.client import QUICK, Client, serving
from server.router_scene import EVENTS
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.server.api.errors import ApiError
from understudy.server.faults import FaultOrder
from understudy.server.settings import ServerSettings
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from collections.abc import Callable

C = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 2}
HOST = TiersConfig.from_dict(
    {
        "tiers": [{"tier": "g2", "blocks": 256, "link": {"down_gbps": 1.0, "up_gbps": 1.0}}],
        "kv_bytes_per_token": 2000,
    }
)


async def order(client: Client, kind: str, **fields: Any) -> Any:
    reply = await client.post("/admin/fault", {"kind": kind, **fields})
    assert reply.status == 200, reply.body
    return reply.json


async def active(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await client.get("/admin/fault")).json["faults"]
    return found


async def until(done: Callable[[], Any]) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while not await done():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.02)


def test_active_faults_are_listed_with_their_fields_until_they_end() -> None:
    async def main() -> None:
        async with serving(tiers=HOST, kv_events_config=EVENTS) as (client, _):
            assert await active(client) == []
            await order(client, "delay", delay_ms=1, rate=0.5, seed=3)
            await order(client, "reject", status=429)  # in place of the delay
            await order(client, "slow_link", factor=4.0, duration_s=60)
            await order(client, "stop_events")
            await order(client, "lose_events", count=2)
            rows = {row["kind"]: row for row in await active(client)}
            assert set(rows) == {"reject", "slow_link", "stop_events", "lose_events"}
            whole = {"status": 429, "rate": 1.0, "seed": 0, "duration_s": None, "left_s": None}
            assert rows["reject"] == {"worker": 0, "kind": "reject", **whole}
            assert rows["slow_link"]["factor"] == 4.0
            assert 0 < rows["slow_link"]["left_s"] <= rows["slow_link"]["duration_s"] == 60
            assert rows["lose_events"]["count"] == 2
            await order(client, "resume_events")
            assert "stop_events" not in {row["kind"] for row in await active(client)}
            await order(client, "none")
            assert await active(client) == []
            assert (await client.post(C, BODY)).status == 200
            assert (await client.ask("DELETE", "/admin/fault")).headers["allow"] == "GET, POST"

    asyncio.run(main())


def test_a_fault_ends_by_itself_after_its_duration() -> None:
    async def main() -> None:
        async with serving(tiers=HOST, kv_events_config=EVENTS) as (client, server):
            await order(client, "reject", duration_s=0.3)
            await order(client, "stop_events", duration_s=0.3)
            await order(client, "slow_link", duration_s=0.3)
            assert len(await active(client)) == 3
            assert (await client.post(C, BODY)).status == 503
            assert server.worker.senders[0].stopped

            async def ended() -> bool:
                return await active(client) == []

            await until(ended)
            assert (await client.post(C, BODY)).status == 200
            assert not server.worker.senders[0].stopped

    asyncio.run(main())


def test_a_later_order_replaces_the_end_of_an_earlier_one() -> None:
    async def main() -> None:
        async with serving() as (client, _):
            await order(client, "reject", duration_s=0.1)
            await order(client, "reject", status=429)
            await asyncio.sleep(0.2)
            assert (await client.post(C, BODY)).status == 429

    asyncio.run(main())


def test_a_worker_that_is_killed_for_a_while_is_down_and_comes_back_empty() -> None:
    async def main() -> None:
        pool = ServerSettings(model="stub", engine=QUICK, max_model_len=4096)
        fleet = Fleet(FleetSettings(pools=((2, pool),), base_port=0, port=0))
        await fleet.start()
        client, down = Client(fleet.port), Client(fleet.servers[1].port)
        try:
            told = await order(client, "kill", workers=[1], duration_s=0.5)
            assert told == {"fault": "kill", "workers": [1], "lost_requests": 0}
            assert [(row["worker"], row["kind"]) for row in await active(client)] == [(1, "kill")]
            assert (await down.get("/health")).status == 503
            assert (await down.post(C, BODY)).status == 500
            assert [(await client.post(C, BODY)).headers["x-understudy-worker"] for _ in range(2)] == [
                "0",
                "0",
            ]

            async def up() -> bool:
                return (await down.get("/health")).status == 200

            await until(up)
            assert await active(client) == []
            assert (await down.post(C, BODY)).status == 200
            await order(client, "kill", workers=[1], duration_s=60)
            await order(client, "kill", workers=[1])  # without a duration it restarts at once
            assert await up()
            await order(client, "kill", workers=[1], duration_s=60)
            await order(client, "none")
            assert await up()
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    asyncio.run(main())


@pytest.mark.parametrize("given", [0, -1, float("nan"), float("inf")])
def test_a_duration_is_a_finite_number_above_zero(given: float) -> None:
    with pytest.raises(ApiError, match="duration_s must be a finite number above 0"):
        FaultOrder.read({"kind": "reject", "duration_s": given})


@pytest.mark.parametrize("kind", ["lose_events", "resume_events", "none"])
def test_a_fault_that_does_not_last_has_no_duration(kind: str) -> None:
    with pytest.raises(ApiError, match=f"duration_s is not a field of {kind}"):
        FaultOrder.read({"kind": kind, "duration_s": 1})


def test_a_kill_names_its_workers() -> None:
    with pytest.raises(ApiError, match=r"workers must name the workers to kill, as \[0\]") as refused:
        FaultOrder.read({"kind": "kill"})
    assert (refused.value.status, refused.value.param) == (400, "workers")

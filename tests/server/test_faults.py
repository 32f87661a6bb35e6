"""Faults of links, and orders for a fleet over several processes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from server.client import Client, serving
from understudy.cli.fleet import read_fleet
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.fleets.spread import SpreadFleet
from understudy.server.api.errors import ApiError
from understudy.server.faults import FaultOrder, chosen_workers
from understudy.server.settings import ServerSettings
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from understudy.server.server import Server

C = "/v1/completions"

SMALL = VllmConfig(
    block_size=16, num_gpu_blocks=64, max_model_len=1024, timing=Constant(prefill_ms=1.0, decode_ms=1.0)
)
HOST = TiersConfig.from_dict(
    {
        "tiers": [{"tier": "g2", "blocks": 256, "link": {"down_gbps": 1.0, "up_gbps": 0.032}}],
        "kv_bytes_per_token": 2000,
        "offload": {"recompute_fallback": False},
    }
)
"""A block of 32,000 bytes comes back in a millisecond."""


def test_a_link_is_slowed_by_an_order_and_is_as_fast_as_before_when_that_ends() -> None:
    async def first_token_ms(client: Client, server: Server) -> float:
        """Of a prompt whose twenty blocks lie on the host: all of them are loaded."""
        metrics = server.worker.metrics[0]
        for seed in (1000, 2000):  # what pushes it off the device
            await client.post(C, {"prompt": [seed + n for n in range(640)], "max_tokens": 1})
        before, found = metrics.first_token.sum, metrics.external_hits.value
        await client.post(C, {"prompt": [*range(320), 7], "max_tokens": 1})
        assert metrics.external_hits.value - found == 320
        return (metrics.first_token.sum - before) * 1e3

    async def main() -> None:
        async with serving(engine=SMALL, max_model_len=1024, tiers=HOST) as (client, server):
            await client.post(C, {"prompt": [*range(320), 7], "max_tokens": 1})
            usual = await first_token_ms(client, server)
            assert 20 <= usual < 30
            told = await client.post("/admin/fault", {"kind": "slow_link", "tier": "g2", "factor": 8})
            assert told.json == {"fault": "slow_link", "workers": [0], "lost_requests": 0}
            assert 160 <= await first_token_ms(client, server) < 190
            await client.post("/admin/fault", {"kind": "none"})
            assert 20 <= await first_token_ms(client, server) < 30

    asyncio.run(main())


def test_a_limit_of_both_directions_together_is_slowed_too() -> None:
    link = {"down_gbps": float("inf"), "up_gbps": float("inf"), "duplex_gbps": 0.32}
    both = TiersConfig.from_dict(
        {
            "tiers": [{"tier": "g2", "blocks": 256, "link": link}],
            "kv_bytes_per_token": 2000,
            "offload": {"recompute_fallback": False},
        }
    )

    async def main() -> None:
        async with serving(engine=SMALL, max_model_len=1024, tiers=both, clock_speed=10.0) as (
            client,
            server,
        ):
            first = server.worker.metrics[0].first_token

            async def load_ms() -> float:
                """Of twenty blocks that lie on the host and nothing else is under way."""
                for seed in (1000, 2000):
                    await client.post(C, {"prompt": [seed + n for n in range(640)], "max_tokens": 1})
                await asyncio.sleep(0.1)  # a second there, far more than their way down takes
                before = first.sum
                await client.post(C, {"prompt": [*range(320), 7], "max_tokens": 1})
                return (first.sum - before) * 1e3

            await client.post(C, {"prompt": [*range(320), 7], "max_tokens": 1})
            assert 2 <= await load_ms() < 6
            await client.post("/admin/fault", {"kind": "slow_link", "factor": 8})
            assert 16 <= await load_ms() < 20
            await client.post("/admin/fault", {"kind": "none"})
            assert 2 <= await load_ms() < 6

    asyncio.run(main())


def test_a_link_that_is_not_there_or_has_no_limit_is_not_slowed() -> None:
    inf = float("inf")
    free = TiersConfig.from_dict(
        {
            "tiers": [{"tier": "g2", "blocks": 9, "link": {"down_gbps": inf, "up_gbps": inf}}],
            "kv_bytes_per_token": 2000,
        }
    )
    workers = [ServerSettings(engine=SMALL, tiers=tiers) for tiers in (HOST, TiersConfig(), free)]

    def order(**given: Any) -> FaultOrder:
        return FaultOrder.read({"kind": "slow_link", **given})

    assert chosen_workers(order(workers=[0]), workers) == [0]
    for index in (1, 2):
        with pytest.raises(ApiError, match=f"worker {index} has no g2 tier behind a link with a limit"):
            chosen_workers(order(workers=[index]), workers)
    with pytest.raises(ApiError, match="worker 0 has no g3"):
        chosen_workers(order(tier="g3"), workers)
    with pytest.raises(ApiError, match="there is no worker 3"):
        chosen_workers(order(workers=[3]), workers)
    for factor in (0.5, 1001, float("nan")):
        with pytest.raises(ApiError, match="factor must be from 1 to 1000"):
            order(factor=factor)


def test_a_fleet_over_processes_has_the_page_and_takes_orders_for_all_its_workers() -> None:
    line = ["stub", "--workers", "3", "--processes", "2", "--base-port", "0", "--port", "0"]
    settings, processes = read_fleet([*line, "--time-to-first-token", "1", "--inter-token-latency", "1"])
    body = {"prompt": "x", "max_tokens": 4}

    async def main() -> None:
        fleet = SpreadFleet(settings, processes)
        await fleet.start()
        client = Client(fleet.port)
        try:
            assert (await client.get("/")).body.startswith(b"<!doctype html>")
            assert [(await client.post(C, body)).status for _ in range(3)] == [200] * 3
            state = (await client.get("/fleet/state")).json
            assert state["ports"] == fleet.ports
            assert state["workers"]["tokens"] == [4, 4, 4]
            assert {len(column) for column in state["workers"].values()} == {3}
            assert sorted(row["worker"] for row in state["decisions"]) == [0, 1, 2]
            assert set(state["late_ms"]) == {"token_p50", "token_p99", "step_p99"}
            seen = [(await client.get(f"/fleet/workers/{n}")).json for n in range(3)]
            assert [(one["worker"], one["port"]) for one in seen] == list(enumerate(fleet.ports))
            assert (await client.get("/fleet/workers/3")).status == 404

            told = await client.post("/admin/fault", {"kind": "reject", "status": 429, "workers": [1, 2]})
            assert told.json == {"fault": "reject", "workers": [1, 2], "lost_requests": 0}
            assert sorted([(await client.post(C, body)).status for _ in range(3)]) == [200, 429, 429]
            assert (await client.post("/admin/fault", {"kind": "none"})).json["workers"] == [0, 1, 2]
            assert [(await client.post(C, body)).status for _ in range(3)] == [200] * 3
            assert (await client.post("/admin/fault", {"kind": "kill", "workers": [3]})).status == 400
            assert (await client.post("/admin/fault", {"kind": "slow_link"})).status == 400
            assert (await client.post("/admin/fault", {"kind": "fall"})).status == 400
            await watch(fleet.port)
        finally:
            await fleet.stop()

    asyncio.run(main())


async def watch(port: int) -> None:
    """The page's stream begins with the state; changes follow."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /fleet/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    for name in ("workers", "changed"):
        line = await reader.readuntil(b"\n\n")
        told = msgspec.json.decode(line[line.index(b"data: ") + 6 :])
        assert name in told
        assert (name == "changed") or len(told["workers"]["running"]) == 3
    writer.close()


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1"])
@pytest.mark.parametrize(("kind", "name"), [("delay", "delay_ms"), ("drop", "after_ms")])
def test_a_fault_of_no_time_that_there_is_is_refused(kind: str, name: str, value: str) -> None:
    async def main() -> None:
        async with serving() as (client, _):
            refused = await client.post("/admin/fault", f'{{"kind": "{kind}", "{name}": {value}}}'.encode())
            assert refused.status == 400
            assert name in refused.json["error"]["message"]
            assert (await client.post(C, {"prompt": "x", "max_tokens": 2})).status == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ({"kind": "lose_events", "count": -3}, "count must be at least 1, got -3"),
        ({"kind": "lose_events", "count": 0}, "count must be at least 1, got 0"),
        ({"kind": "reject", "workers": []}, "workers is empty; leave it out for all workers"),
        ({"kind": "kill", "workers": [0, 0]}, "workers lists a worker twice: [0, 0]"),
        (
            {"kind": "reject", "delay_ms": 1},
            "delay_ms is not a field of reject, which takes workers, status, rate, seed",
        ),
        ({"kind": "kill", "rate": 0.5}, "rate is not a field of kill, which takes workers"),
        (
            {"kind": "slow_link", "status": 503},
            "status is not a field of slow_link, which takes workers, tier,",
        ),
        (
            {"kind": "foo"},
            "kind must be one of delay, drop, fail_reads, kill, lose_events, none, reject, resume_events, slow, "
            "slow_link, stop_events; got 'foo'",
        ),
        ({"kind": "reject", "rate": 1.5}, "rate must be a share from 0 to 1, got 1.5"),
        ({"kind": "reject", "status": 99}, "status must be from 200 to 599, got 99"),
        ({"kind": "delay", "delay_ms": -1}, "delay_ms must be a finite number from 0, got -1"),
        ({"kind": "drop", "after_ms": -2}, "after_ms must be a finite number from 0, got -2"),
        ({"kind": "reject", "colour": 1}, "colour is not known; known are kind, workers, rate"),
        ({"rate": 1}, "kind is missing"),
        ([], "the settings must be"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused_by_its_field(order: Any, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        FaultOrder.read(order)
    assert message in str(refused.value)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "order",
    [
        {"kind": "reject", "status": 429, "rate": 0.5, "seed": 7},
        {"kind": "lose_events", "count": 3},
        {"kind": "slow_link", "tier": "g3", "factor": 2.0, "workers": [1]},
        {"kind": "none"},
    ],
)
def test_an_order_that_is_passed_on_is_read_as_it_was(order: dict[str, Any]) -> None:
    read = FaultOrder.read(order)
    assert FaultOrder.read(msgspec.json.decode(msgspec.json.encode(read))) == read

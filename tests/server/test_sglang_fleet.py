"""SGLang workers in a fleet and behind a router, alone and next to vLLM's: KV events, routing and counts."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from server.client import QUICK as VLLM
from server.client import Client, serving
from server.events_scene import Reader
from server.router_scene import EVENTS, Scene
from server.sglang_server import QUICK, until
from understudy.errors import ConfigError
from understudy.events.wire import AllBlocksCleared, BlockRemoved, BlockStored
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.proxy.address import WorkerAddress
from understudy.proxy.service import RouterService, RouterSettings
from understudy.server.settings import ServerSettings
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from understudy.server.server import Server

C, G = "/v1/completions", "/generate"
PAGED = msgspec.structs.replace(QUICK, block_size=16, num_gpu_blocks=1024)
PROMPT = list(range(1000, 1064))


def watch(test: Any, **settings: Any) -> None:
    """Run a test with a server and a reader of its events."""

    async def main() -> None:
        given = {"engine": PAGED, "kv_events_config": EVENTS, **settings}
        async with serving(**given) as (client, server):
            reader = Reader((await client.get("/kv_event_sources")).json["0"]["endpoint"])
            try:
                await asyncio.sleep(0.3)  # a subscription takes a moment to arrive
                await test(client, server, reader)
            finally:
                reader.close()

    asyncio.run(main())


async def ask(client: Client, prompt: list[int], tokens: int = 2) -> Any:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    return (await client.post(G, body)).json["meta_info"]


def test_a_prefill_publishes_its_pages_and_a_flush_clears_them() -> None:
    async def test(client: Client, server: Server, reader: Reader) -> None:
        await ask(client, PROMPT)
        _, batch = await reader.next()
        cleared, stored = batch.events  # SGLang's stream starts with a cleared cache
        assert isinstance(cleared, AllBlocksCleared)
        assert isinstance(stored, BlockStored)
        assert (stored.token_ids, stored.block_size, stored.medium) == (PROMPT, 16, "GPU")
        assert len(stored.block_hashes) == 4
        await until(lambda: server.worker.cores[0].is_empty)
        assert (await client.get("/flush_cache")).status == 200
        _, batch = await reader.next()
        assert [type(event) for event in batch.events] == [AllBlocksCleared]
        await ask(client, PROMPT)
        _, batch = await reader.next()
        assert batch.events[0].block_hashes == stored.block_hashes

    watch(test)


def test_copies_to_the_host_are_published_when_they_land() -> None:
    tiers = TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 1024,
            "tiers": [{"tier": "g2", "blocks": 64, "link": {"down_gbps": 0.001, "up_gbps": 0.01}}],
        }
    )

    async def test(client: Client, server: Server, reader: Reader) -> None:
        await ask(client, PROMPT)
        _, batch = await reader.next()
        assert {event.medium for event in batch.events if isinstance(event, BlockStored)} == {"GPU"}
        await until(lambda: server.worker.cores[0].is_empty)  # the copy of 64 KiB takes 66 ms
        _, batch = await reader.next()
        (copied,) = batch.events
        assert (type(copied), copied.medium, copied.token_ids) == (BlockStored, "CPU_PINNED", PROMPT)

    watch(test, tiers=tiers)


def test_evicted_pages_are_published_as_removed() -> None:
    async def test(client: Client, server: Server, reader: Reader) -> None:
        for first in (0, 1000, 2000):
            await ask(client, list(range(first, first + 100)))
        removed = 0
        async with asyncio.timeout(10):
            while not removed:
                _, batch = await reader.next()
                removed += sum(isinstance(event, BlockRemoved) for event in batch.events)

    watch(test, engine=msgspec.structs.replace(PAGED, num_gpu_blocks=16))


def pools(**settings: Any) -> tuple[tuple[int, ServerSettings], ...]:
    base = {"model": "stub", "max_model_len": 4096, "port": 0, **settings}
    return (2, ServerSettings(engine=VLLM, **base)), (2, ServerSettings(engine=PAGED, **base))


def test_a_fleet_of_both_kinds_routes_by_blocks_and_counts_every_token() -> None:
    async def main() -> None:
        fleet = Fleet(FleetSettings(pools=pools(), base_port=0, port=0, routing="kv"))
        await fleet.start()
        try:
            client = Client(fleet.port)
            homes = {}
            for seed in range(8):
                prompt = [seed * 1000 + place for place in range(320)]
                reply = await client.post(C, {"prompt": prompt, "max_tokens": 4, "ignore_eos": True})
                assert reply.json["usage"]["completion_tokens"] == 4
                homes[seed] = reply.headers["x-understudy-worker"]
            assert set(homes.values()) == {"0", "1", "2", "3"}
            for seed, home in homes.items():
                prompt = [*(seed * 1000 + place for place in range(320)), 5, 6]
                again = await client.post(C, {"prompt": prompt, "max_tokens": 4, "ignore_eos": True})
                assert again.headers["x-understudy-worker"] == home
            page = (await client.get("/metrics")).body.decode()
            counted = {
                name: sum(
                    float(line.rpartition(" ")[2])
                    for line in page.splitlines()
                    if line.startswith(f"{name}:generation_tokens_total{{")
                )
                for name in ("vllm", "sglang")
            }
            assert sum(counted.values()) == 64
            assert all(count > 0 for count in counted.values())
            assert (await client.get("/fleet/state")).json["workers"]["state"] == ["ready"] * 4
            shown = (await client.get("/fleet/workers/2")).json["cache"]
            assert shown[0]["tier"] == "device"
            assert shown[0]["cached"] > 0
            native = await client.post(G, {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}})
            assert native.json["meta_info"]["completion_tokens"] == 2
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    asyncio.run(main())


def test_pools_whose_pages_differ_are_refused_where_routing_needs_blocks() -> None:
    first, (count, second) = pools()
    other = msgspec.structs.replace(second, engine=msgspec.structs.replace(QUICK, block_size=1))
    settings = FleetSettings(pools=(first, (count, other)), base_port=0, port=0, routing="kv")
    with pytest.raises(ConfigError, match="pools: blocks of 1 and 16 tokens"):
        Fleet(settings)
    Fleet(msgspec.structs.replace(settings, routing="round_robin"))


def test_a_router_follows_the_events_of_both_kinds() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = []
            for engine in (VLLM, PAGED):
                given = {"engine": engine, "kv_events_config": EVENTS}
                servers.append((await stack.enter_async_context(serving(**given)))[1])
            addresses = tuple(WorkerAddress(url=f"http://127.0.0.1:{server.port}") for server in servers)
            service = RouterService(
                RouterSettings(workers=addresses, routing="kv", port=0, silence_s=60, look_every_s=0.05)
            )
            await service.start()
            stack.push_async_callback(service.stop)
            scene = Scene(service, servers)
            homes = set()
            for seed in range(4):
                prompt = [seed * 1000 + place for place in range(320)]
                reply = await scene.client.post(C, {"prompt": prompt, "max_tokens": 2})
                home = int(reply.headers["x-understudy-worker"])
                homes.add(home)

                async def known(home: int = home, prompt: list[int] = prompt) -> bool:
                    rows = (await scene.client.post("/query", {"token_ids": prompt})).json["workers"]
                    return bool(rows[home]["held"]["device"] == 20)

                await scene.until(known)
                again = await scene.client.post(C, {"prompt": [*prompt, 5, 6], "max_tokens": 1})
                assert again.headers["x-understudy-worker"] == str(home)
            assert homes == {0, 1}

    asyncio.run(main())

"""A live engine with several KV cache groups and vLLM's own offload."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import understudy as us
from server.client import Client, serving
from server.events_scene import Reader, run
from understudy.cli.fleet import read_fleet
from understudy.engines.timing import Constant
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.run.settings import ReplaySettings
from understudy.server.flags.serving import read_serve
from understudy.server.server import Server
from understudy.server.settings import ServerSettings
from understudy.tiers.settings import TiersConfig

C = "/v1/completions"
WINDOW = us.KvCacheGroup(kind="sliding_window", block_size=16, window=64)
FULL = us.KvCacheGroup(kind="full", block_size=16)
GROUPS = {
    "window": (WINDOW, FULL),
    "rswa": (us.KvCacheGroup(kind="rswa", block_size=16, window=64), WINDOW),
    "ring": (us.KvCacheGroup(kind="circular", block_size=8), WINDOW, FULL),
    "states": (us.KvCacheGroup(kind="mamba", block_size=16), FULL),
    "replay": (
        us.KvCacheGroup(kind="sliding_window_mla", block_size=16, window=32, bounded_replay=True),
        FULL,
    ),
}
HOST = TiersConfig.from_dict(
    {"tiers": [{"tier": "g2", "blocks": 400}], "kv_bytes_per_token": 1024, "offload": {"mode": "vllm"}}
)


def settings_of(groups: tuple[us.KvCacheGroup, ...], tiers: TiersConfig) -> dict[str, Any]:
    engine = us.VllmConfig(
        kv_cache_groups=groups,
        num_gpu_blocks=60,
        max_model_len=400,
        timing=Constant(prefill_ms=1.0, decode_ms=1.0),
    )
    return {
        "engine": engine,
        "max_model_len": 400,
        "tiers": tiers,
        "enable_prompt_tokens_details": True,
    }


async def count_cached(client: Client, settled: Any) -> list[int]:
    """Send four prompts that do not fit together, then the first again; returns the cached tokens of each."""
    found = []
    for number in (0, 1, 2, 3, 0):
        prompt = list(range(1000 * number, 1000 * number + 300))
        reply = await client.post(C, {"prompt": prompt, "max_tokens": 2})
        assert reply.status == 200, reply.body
        found.append(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])
        await settled()
    return found


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_server_loads_evicted_blocks_of_all_groups_from_its_host(
    groups: tuple[us.KvCacheGroup, ...],
) -> None:
    async def main(tiers: TiersConfig) -> list[int]:
        async with serving(**settings_of(groups, tiers)) as (client, server):

            async def settled() -> None:
                while not server.runtime.driver.idle:
                    await asyncio.sleep(0.001)

            return await count_cached(client, settled)

    assert asyncio.run(main(TiersConfig())) == [0] * 5
    replayed = sum(group.window or 0 for group in groups if group.bounded_replay)
    assert asyncio.run(main(HOST)) == [0] * 4 + [288 - replayed]


def test_a_fleet_routes_to_the_worker_whose_host_has_the_prompt() -> None:
    async def main() -> tuple[list[int], int]:
        pool = ServerSettings(model="stub", **settings_of((WINDOW, FULL), HOST))
        fleet = Fleet(FleetSettings(pools=((1, pool),), base_port=0, port=0, routing=us.KvRouting()))
        await fleet.start()
        try:
            dispatcher = fleet.routing.dispatcher

            async def settled() -> None:
                while not fleet.runtime.driver.idle:
                    await asyncio.sleep(0.001)

            cached = await count_cached(Client(fleet.port), settled)
            assert dispatcher.kv is not None
            return cached, dispatcher.kv.last.lower_overlap_blocks
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    cached, below = asyncio.run(main())
    assert cached == [0] * 4 + [288]
    assert below == 18


def test_events_name_a_chunk_of_the_host_by_its_hash_and_group() -> None:
    async def test(client: Client, server: Any, reader: Reader) -> None:
        await client.post(C, {"prompt": list(range(300)), "max_tokens": 2})
        device: dict[int, list[Any]] = {0: [], 1: []}
        host: dict[int, list[Any]] = {0: [], 1: []}
        while len(host[1]) < 18:
            _, batch = await reader.next()
            for event in batch.events:
                (device if event.medium == "GPU" else host)[event.group_idx] += event.block_hashes
                if event.medium == "CPU":
                    assert (len(event.block_hashes), event.parent_block_hash) == (1, None)
                    assert (event.token_ids, event.block_size, event.kv_cache_spec_kind) == ([], 0, None)
        assert host == device

    settings = settings_of((WINDOW, FULL), HOST)
    run(test, tiers=settings.pop("tiers"), settings=settings)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("model", ["gpt-oss-120b", "Gemma-3-27B"])
def test_flags_size_the_host_of_a_model_with_groups_as_a_replay_does(model: str, dtype: str) -> None:
    flags = f"{model} --gpu H200 --kv-cache-dtype {dtype} --kv-offloading-size 8".split()
    served = read_serve(flags).settings
    on_gpu = {"model": model, "kv_dtype": dtype, "gpu": {"name": "H200"}, "engine": {"block_size": 16}}
    host = {"tiers": [{"tier": "g2", "bytes": 8 << 30}], "offload": {"mode": "vllm"}}
    replayed = ReplaySettings.read(None, on_gpu | host, [])
    assert served.tiers.kv_bytes_per_token == replayed.tiers.kv_bytes_per_token is not None
    assert read_fleet([*flags, "--workers", "2"])[0].pools[0][1].tiers == served.tiers
    Server(served)

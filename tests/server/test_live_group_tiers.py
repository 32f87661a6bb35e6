"""A live engine with several KV cache groups and tiers of ours below them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import understudy as us
from replay.building import single_turns
from server.client import Client, serving
from server.events_scene import Reader, run
from server.test_live_group_offload import C, count_cached, settings_of
from server.test_live_groups import engine_of, list_turns, tokens_of
from understudy.cli.fleet import read_fleet
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.settings import ReplaySettings
from understudy.server.flags.serving import read_serve
from understudy.server.server import Server
from understudy.server.settings import ServerSettings
from understudy.tiers.settings import TiersConfig

WINDOW = us.KvCacheGroup(kind="sliding_window", block_size=16, window=64)
FULL = us.KvCacheGroup(kind="full", block_size=16)
GROUPS = {
    "window": (WINDOW, FULL),
    "wide": (WINDOW, us.KvCacheGroup(kind="full", block_size=32)),
    "chunk": (us.KvCacheGroup(kind="chunked_local", block_size=16, chunk=128), FULL),
}


def below(g2: int, mode: str = "write_through", **offload: Any) -> TiersConfig:
    offload = {"mode": mode, "recompute_fallback": False, **offload}
    tiers = [{"tier": "g2", "blocks": g2}]
    return TiersConfig.from_dict({"tiers": tiers, "kv_bytes_per_token": 1024, "offload": offload})


@pytest.mark.parametrize("mode", ["write_through", "evict"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_server_loads_evicted_blocks_of_all_groups_from_its_host(
    groups: tuple[us.KvCacheGroup, ...], mode: str
) -> None:
    async def main(tiers: TiersConfig) -> list[int]:
        async with serving(**settings_of(groups, tiers)) as (client, server):

            async def settled() -> None:
                while not server.runtime.driver.idle:
                    await asyncio.sleep(0.001)

            return await count_cached(client, settled)

    assert asyncio.run(main(below(400, mode))) == [0] * 4 + [288]


def replay(
    groups: tuple[us.KvCacheGroup, ...], tiers: TiersConfig
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Replay the turns one after another; returns worker and overlaps of each decision, and the cached tokens."""
    turns = list_turns()
    load = single_turns(
        [16 * len(blocks) + 5 for blocks in turns],
        arrival_ms=[10_000.0 * row for row in range(len(turns))],
        content=[[*blocks, 1_000_000 + row] for row, blocks in enumerate(turns)],
    )
    run = run_offline(
        RunPlan(load, engine_of(groups), workers=2, routing=us.KvRouting(), seed=0, tiers=tiers)
    )
    found = run.decisions
    assert found is not None
    overlaps = zip(found.worker, found.overlap_blocks, found.lower_overlap_blocks, strict=True)
    return [(int(w), int(o), int(b)) for w, o, b in overlaps], run.timeline.cached_tokens_first.tolist()


def route_in_fleet(
    groups: tuple[us.KvCacheGroup, ...], tiers: TiersConfig
) -> tuple[list[tuple[int, int, int]], list[int]]:
    """Send the turns to a live fleet one after another; returns what `replay` returns."""

    async def main() -> tuple[list[tuple[int, int, int]], list[int]]:
        pool = ServerSettings(
            model="stub",
            engine=engine_of(groups),
            max_model_len=800,
            tiers=tiers,
            enable_prompt_tokens_details=True,
        )
        fleet = Fleet(FleetSettings(pools=((2, pool),), base_port=0, port=0, routing=us.KvRouting()))
        await fleet.start()
        try:
            kv, client = fleet.routing.dispatcher.kv, Client(fleet.port)
            assert kv is not None
            decisions, cached = [], []
            for blocks in list_turns():
                reply = await client.post(C, {"prompt": tokens_of(blocks), "max_tokens": 1})
                assert reply.status == 200, reply.body
                last = kv.last
                decisions.append((last.worker, last.overlap_blocks, last.lower_overlap_blocks))
                cached.append(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])
                while not fleet.runtime.driver.idle:
                    await asyncio.sleep(0.001)
            return decisions, cached
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    return asyncio.run(main())


@pytest.mark.parametrize("mode", ["write_through", "evict"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_live_fleet_decides_and_serves_as_a_replay_does(
    groups: tuple[us.KvCacheGroup, ...], mode: str
) -> None:
    tiers = below(400, mode)
    expected = replay(groups, tiers)
    assert any(overlap[2] for overlap in expected[0]) or groups == GROUPS["wide"]
    assert route_in_fleet(groups, tiers) == expected


def test_events_name_a_block_of_the_host_by_its_hash_and_group() -> None:
    async def test(client: Client, server: Any, reader: Reader) -> None:
        assert server.worker.senders
        held: dict[tuple[str, int], set[int]] = {}

        async def read(group: int, blocks: int) -> None:
            while len(held.get(("CPU", group), ())) < blocks:
                _, batch = await reader.next()
                for event in batch.events:
                    place = held.setdefault((event.medium, event.group_idx), set())
                    if hasattr(event, "token_ids"):
                        place.update(event.block_hashes)
                        if event.medium == "CPU":
                            assert (event.token_ids, event.block_size, event.parent_block_hash) == (
                                [],
                                0,
                                None,
                            )
                        else:
                            assert len(event.token_ids) % 16 == 0
                            assert event.token_ids
                    else:
                        place.difference_update(event.block_hashes)

        await client.post(C, {"prompt": list(range(300)), "max_tokens": 2})
        await read(1, 18)
        assert [held["CPU", group] for group in (0, 1)] == [held["GPU", group] for group in (0, 1)]
        for number in (1, 2, 3, 0):
            prompt = list(range(1000 * number, 1000 * number + 300))
            await client.post(C, {"prompt": prompt, "max_tokens": 2})
        await read(1, 72)
        assert held["GPU", 1] < held["CPU", 1]

    settings = settings_of((WINDOW, FULL), below(400))
    run(test, tiers=settings.pop("tiers"), settings=settings)


def test_flags_size_the_tiers_of_a_model_with_groups_as_a_replay_does() -> None:
    tiers = '{"tiers": [{"tier": "g2", "bytes": "64GiB"}], "model": "gpt-oss-120b"}'
    flags = ["gpt-oss-120b", "--gpu", "H200", "--tiers", tiers]
    served = read_serve(flags).settings
    on_gpu = {"model": "gpt-oss-120b", "gpu": {"name": "H200"}, "engine": {"block_size": 16}}
    replayed = ReplaySettings.read(None, on_gpu | {"tiers": [{"tier": "g2", "bytes": "64GiB"}]}, [])
    assert served.tiers.kv_bytes_per_token == replayed.tiers.kv_bytes_per_token is not None
    assert read_fleet([*flags, "--workers", "2"])[0].pools[0][1].tiers == served.tiers
    Server(served)

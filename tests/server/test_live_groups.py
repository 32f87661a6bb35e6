"""Live KV routing with several cache groups: decisions are those of a replay of the same requests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import understudy as us
from replay.building import single_turns
from server.client import Client
from server.router_scene import Scene, scene
from understudy.engines.timing import Constant
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from understudy.proxy.workers import Rank
    from understudy.router.dispatch import Dispatcher

C = "/v1/completions"
WINDOW = us.KvCacheGroup(kind="sliding_window", block_size=16, window=64)
FULL = us.KvCacheGroup(kind="full", block_size=16)
WIDE = us.KvCacheGroup(kind="full", block_size=32)
CHUNK = us.KvCacheGroup(kind="chunked_local", block_size=16, chunk=128)
STATE = us.KvCacheGroup(kind="mamba", block_size=64)
GROUPS = {
    "window": (WINDOW, FULL),
    "wide": (WINDOW, WIDE),
    "chunk": (CHUNK, FULL),
    "state": (STATE, us.KvCacheGroup(kind="full", block_size=64)),
}


def engine_of(groups: tuple[us.KvCacheGroup, ...]) -> us.VllmConfig:
    """Build an engine whose windows are evicted before full attention is."""
    return us.VllmConfig(
        kv_cache_groups=groups,
        num_gpu_blocks=120,
        max_model_len=800,
        timing=Constant(prefill_ms=1.0, decode_ms=1.0),
    )


def list_turns() -> list[list[int]]:
    """List prompts by the content of their 16-token blocks: eight conversations that grow in turn."""
    draw = np.random.default_rng(7)
    shared = list(range(12))
    history = [
        [*shared[: 4 * (number % 4)], *range(100 * (number + 1), 100 * (number + 1) + 6)]
        for number in range(8)
    ]
    turns = []
    for turn in range(6):
        for number in draw.permutation(8).tolist():
            if turn:
                start = 100 * (number + 1) + 10 * turn
                history[number] = [*history[number], *range(start, start + int(draw.integers(2, 7)))]
            turns.append(history[number])
    return turns


def tokens_of(blocks: list[int]) -> list[int]:
    return [block * 16 + place for block in blocks for place in range(16)] + [7] * 5


def replay(groups: tuple[us.KvCacheGroup, ...], routing: us.KvRouting) -> list[tuple[int, int]]:
    """Replay the turns one after another; returns worker and overlap of each decision."""
    turns = list_turns()
    load = single_turns(
        [16 * len(blocks) + 5 for blocks in turns],
        arrival_ms=[10_000.0 * row for row in range(len(turns))],
        content=[[*blocks, 1_000_000 + row] for row, blocks in enumerate(turns)],
    )
    found = run_offline(RunPlan(load, engine_of(groups), workers=2, routing=routing, seed=0)).decisions
    assert found is not None
    return list(zip(found.worker.tolist(), found.overlap_blocks.tolist(), strict=True))


async def send_turns(
    client: Client,
    dispatcher: Dispatcher,
    settled: Callable[[], Awaitable[None]],
    cached: list[int] | None = None,
) -> list[tuple[int, int]]:
    """Send the turns one after another; returns worker and overlap of each decision, and appends hits to `cached`."""
    assert dispatcher.kv is not None
    decisions = []
    for blocks in list_turns():
        reply = await client.post(C, {"prompt": tokens_of(blocks), "max_tokens": 1})
        assert reply.status == 200, reply.body
        last = dispatcher.kv.last
        decisions.append((last.worker, last.overlap_blocks))
        if cached is not None:
            cached.append(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])
        await settled()
    return decisions


def route_in_fleet(groups: tuple[us.KvCacheGroup, ...], routing: us.KvRouting) -> list[tuple[int, int]]:
    async def main() -> list[tuple[int, int]]:
        pool = ServerSettings(model="stub", engine=engine_of(groups), max_model_len=800)
        fleet = Fleet(FleetSettings(pools=((2, pool),), base_port=0, port=0, routing=routing))
        await fleet.start()
        try:
            dispatcher = fleet.routing.dispatcher

            async def settled() -> None:
                while dispatcher.outstanding.requests != [0, 0]:
                    await asyncio.sleep(0.001)

            return await send_turns(Client(fleet.port), dispatcher, settled)
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    return asyncio.run(main())


@pytest.mark.parametrize("which", ["all", "first"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_live_fleet_decides_as_a_replay_does(groups: tuple[us.KvCacheGroup, ...], which: Any) -> None:
    routing = us.KvRouting(index_groups=which)
    expected = replay(groups, routing)
    assert len({worker for worker, _ in expected}) == 2
    if which == "all":
        assert any(overlap for _, overlap in expected)
    assert route_in_fleet(groups, routing) == expected


async def connect(told: Scene) -> None:
    """Send prompts to the engines themselves until the router receives live events; then empty their caches."""
    for rank, server in zip(told.service.workers.each_rank, told.servers, strict=True):
        client, start = Client(server.port), 20_000

        async def heard(rank: Rank = rank, client: Client = client) -> bool:
            nonlocal start
            start += 100
            reply = await client.post(C, {"prompt": list(range(start, start + 100)), "max_tokens": 1})
            assert reply.status == 200, reply.body
            return bool(rank.follower.counters.get("messages"))

        await told.until(heard)
        assert server.worker.reset_prefix_cache()


def route_through_proxy(
    groups: tuple[us.KvCacheGroup, ...],
    routing: us.KvRouting,
    cached: list[int] | None = None,
    **settings: Any,
) -> list[tuple[int, int]]:
    """Route the turns with a standalone router, which knows the engines by their HTTP answers and events alone."""

    async def main() -> list[tuple[int, int]]:
        server = {"engine": engine_of(groups), "max_model_len": 800, "enable_prompt_tokens_details": True}
        async with scene(2, routing, server=server, **settings) as told:
            views = [rank.follower for rank in told.service.workers.each_rank]
            senders = [server.worker.senders[0] for server in told.servers]
            await connect(told)

            async def settled() -> None:
                async def heard() -> bool:
                    counts = [view.counters for view in views]
                    return [
                        each["messages"] + each["replayed_messages"] - each["duplicates"] for each in counts
                    ] == [sender.next_sequence for sender in senders]

                await told.until(heard)
                assert await told.states() == ["live", "live"]

            await settled()
            return await send_turns(told.client, told.service.dispatcher, settled, cached)

    return asyncio.run(main())


@pytest.mark.parametrize("which", ["all", "first"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_a_router_that_is_given_the_groups_decides_as_a_replay_does(
    groups: tuple[us.KvCacheGroup, ...], which: Any
) -> None:
    routing = us.KvRouting(index_groups=which)
    layout = engine_of(groups).group_layout
    assert route_through_proxy(groups, routing, kv_cache_groups=layout) == replay(groups, routing)


LEARNED = {**{name: GROUPS[name] for name in ("window", "wide", "state")}, "one": ()}


@pytest.mark.parametrize("groups", LEARNED.values(), ids=LEARNED)
def test_a_router_learns_the_groups_from_events(groups: tuple[us.KvCacheGroup, ...]) -> None:
    actual: list[int] = []
    decisions = route_through_proxy(groups, us.KvRouting(), actual)
    unit = engine_of(groups).block_size
    assert [unit * overlap for _, overlap in decisions] == actual
    assert any(actual)
    # An engine has another number once its groups are known.
    assert {worker for worker, _ in decisions} == ({2, 3} if groups else {0, 1})

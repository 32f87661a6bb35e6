"""Pauses and sleep, as vLLM's schedulers have them: who goes on, who waits, what is forgotten, and when it is told."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from server.client import QUICK, serving
from understudy._core import Tier
from understudy.events.events import Removed, Stored
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from server.client import Client, Reply
    from understudy.events.events import PublishedEvent
    from understudy.server.server import Server

C = "/v1/completions"
ONE_BY_ONE = msgspec.structs.replace(QUICK, max_num_seqs=1, vllm_version="0.32")
"""The second request is in the queue, also one that arrives during a pause: 0.33 rejects it."""
LONG = {"prompt": list(range(40)), "max_tokens": 300, "ignore_eos": True}
"""It takes half a minute, so that it is still there when a busy machine comes to it; or none, once `hurry` says so."""
SHORT = {"prompt": list(range(50, 90)), "max_tokens": 1}


def play(what: Callable[[Client, Server], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with serving(dev_mode=True, engine=ONE_BY_ONE, latency_ms=(1.0, 100.0), **settings) as (
            client,
            server,
        ):
            await what(client, server)
            await until(lambda: not server.worker.live())
            assert all(core.vllm.pool[1] == 0 for core in server.worker.cores)

    asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.002)


async def ask(
    client: Client, server: Server, body: dict[str, Any], *, runs: bool, name: str = "x"
) -> asyncio.Task[Reply]:
    """A request that has come, and has begun or is in the queue."""
    asked = asyncio.create_task(client.post(C, body, x_request_id=name))

    def here() -> bool:
        found = [one for one in server.worker.live() if one.name == f"cmpl-{name}"]
        return bool(found) and (not runs or found[0].emitted > 0)

    await until(here)
    return asked


def hurry(server: Server, decode_ms: float = 0.0) -> None:
    """Steps take no time from now on."""
    assert server.worker.latency is not None
    server.worker.latency.decode_cost_ms = decode_ms


async def still_open(task: asyncio.Task[Reply]) -> bool:
    """Nothing of it has come, however often the loop and the server had their turn."""
    for _ in range(20):
        await asyncio.sleep(0.002)
    return not task.done()


def test_a_pause_that_waits_lets_those_in_progress_end_and_nobody_begin() -> None:
    async def what(client: Client, server: Server) -> None:
        running = await ask(client, server, LONG, runs=True, name="running")
        queued = await ask(client, server, SHORT, runs=False, name="queued")
        paused = asyncio.create_task(client.post("/pause?mode=wait", None))
        await until(lambda: server.worker.pauses.paused)
        assert (await client.get("/is_paused")).json == {"is_paused": True}
        late = await ask(client, server, SHORT, runs=False, name="late")
        hurry(server)
        assert (await running).json["choices"][0]["finish_reason"] == "length"
        assert (await paused).json == {"status": "paused"}
        assert await still_open(queued)
        assert await still_open(late)
        assert (
            b'vllm:num_requests_waiting{engine="0",model_name="stub"} 2.0'
            in (await client.get("/metrics")).body
        )
        await client.post("/resume", None)
        assert (await queued).status == (await late).status == 200

    play(what)


def test_a_pause_that_waits_is_over_when_the_last_request_is_cancelled() -> None:
    async def what(client: Client, server: Server) -> None:
        running = await ask(client, server, LONG, runs=True)
        paused = asyncio.create_task(client.post("/pause?mode=wait", None))
        assert await still_open(paused)
        await client.post("/abort_requests", {})
        assert (await running).json["choices"][0]["finish_reason"] == "abort"
        assert (await paused).json == {"status": "paused"}
        assert (await client.get("/is_paused")).json == {"is_paused": True}
        await client.post("/resume", None)

    play(what)


def test_a_pause_of_an_idle_server_is_told_at_once_whatever_its_mode() -> None:
    async def what(client: Client, _: Server) -> None:
        for mode in ("abort", "wait", "keep"):
            assert (await client.post(f"/pause?mode={mode}", None)).json == {"status": "paused"}
            assert (await client.post(f"/pause?mode={mode}", None)).json == {"status": "paused"}  # twice
            assert (await client.post("/resume", None)).json == {"status": "resumed"}

    play(what, data_parallel_size=2)


def test_what_is_cached_goes_with_a_pause_unless_it_is_to_stay() -> None:
    async def what(client: Client, server: Server) -> None:
        async def cached() -> int:
            told = await client.post(C, {**SHORT, "prompt": list(range(48))})
            return int(told.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        await cached()
        for query, found in (("mode=wait&clear_cache=false", 32), ("mode=wait", 0), ("mode=abort", 0)):
            assert await cached() == 32
            assert (await client.post(f"/pause?{query}", None)).status == 200
            queued = await ask(client, server, SHORT, runs=False)
            await client.post("/resume", None)
            await queued
            assert await cached() == found, query

    play(what, enable_prompt_tokens_details=True)


def test_the_cache_goes_though_somebody_came_while_the_pause_waited() -> None:
    async def what(client: Client, server: Server) -> None:
        first = await ask(client, server, LONG, runs=True, name="first")
        paused = asyncio.create_task(client.post("/pause?mode=wait", None))
        await until(lambda: server.worker.pauses.paused)
        again = await ask(client, server, {**LONG, "max_tokens": 1}, runs=False, name="again")
        hurry(server)
        await first
        await paused
        assert server.worker.cores[0].vllm.resident_hashes() == []
        await client.post("/resume", None)
        assert (await again).json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    play(what, enable_prompt_tokens_details=True)


def test_sleep_ends_keeps_or_waits_for_what_is_there() -> None:
    async def what(client: Client, server: Server) -> None:
        for mode, finish in (("abort", "abort"), ("wait", "length"), ("keep", "length")):
            hurry(server, 100.0)
            running = await ask(client, server, LONG, runs=True, name=mode)
            slept = asyncio.create_task(client.post(f"/sleep?level=1&mode={mode}", None))
            await until(lambda: server.worker.pauses.paused)
            hurry(server)
            if mode != "keep":
                assert (await running).json["choices"][0]["finish_reason"] == finish
            assert (await slept).json == {"status": "sleeping", "level": 1}
            assert (await client.get("/is_sleeping")).json == {"is_sleeping": True}
            late = await ask(client, server, SHORT, runs=False, name=f"late-{mode}")
            assert await still_open(late)
            assert (await client.post("/wake_up", None)).json == {"status": "awake", "tags": None}
            assert (await client.get("/is_sleeping")).json == {"is_sleeping": False}
            assert (await running).json["choices"][0]["finish_reason"] == finish
            assert (await late).status == 200

    play(what)


def test_who_is_woken_before_it_sleeps_does_not_sleep_later() -> None:
    async def what(client: Client, server: Server) -> None:
        for path in ("/wake_up", "/wake_up?tags=weights", "/resume"):
            hurry(server, 100.0)
            running = await ask(client, server, LONG, runs=True, name=path[1:7])
            slept = asyncio.create_task(client.post("/sleep?level=1&mode=wait", None))
            await until(lambda: server.worker.pauses.paused)
            assert await still_open(slept)
            assert (await client.post(path, None)).json["status"] in ("awake", "resumed")
            assert (await slept).json == {"status": "awake", "level": 1}
            hurry(server)
            assert (await running).json["choices"][0]["finish_reason"] == "length"
            assert (await client.post(C, SHORT)).status == 200
            assert (await client.get("/is_sleeping")).json == {"is_sleeping": False}
            page = (await client.get("/metrics")).body.decode()
            assert 'sleep_state="awake"} 1.0' in page
            assert 'sleep_state="weights_offloaded"} 0.0' in page

    play(what)


def test_memory_is_taken_back_by_name_and_with_all_of_it_the_engine_goes_on() -> None:
    async def what(client: Client, server: Server) -> None:
        async def state() -> dict[str, bool]:
            page = (await client.get("/metrics")).body.decode()
            return {
                name: f'sleep_state="{name}"}} 1.0' in page
                for name in ("awake", "weights_offloaded", "discard_all")
            }

        await client.post("/sleep?level=2", None)
        assert await state() == {"awake": False, "weights_offloaded": False, "discard_all": True}
        queued = await ask(client, server, SHORT, runs=False)
        for tags, told in (
            ("tags=weights&tags=nothing", "sleeping"),
            ("tags=scheduling", "sleeping"),
            ("tags=weights", "sleeping"),
            ("tags=kv_cache", "awake"),
        ):
            assert await still_open(queued)
            assert (await client.post(f"/wake_up?{tags}", None)).json["status"] == told, tags
        assert (await queued).status == 200
        assert await state() == {"awake": True, "weights_offloaded": False, "discard_all": False}
        await client.post("/sleep?level=0", None)
        assert await state() == dict.fromkeys(("awake", "weights_offloaded", "discard_all"), False)
        assert (await client.get("/is_sleeping")).json == {"is_sleeping": True}
        assert (await client.post("/wake_up?tags=scheduling", None)).json["status"] == "awake"
        await client.post("/pause", None)
        assert (await client.get("/is_sleeping")).json == {"is_sleeping": True}  # a pause is one too
        await client.post("/release_kv_cache_memory", None)
        assert (await client.post("/wake_up?tags=kv_cache", None)).json["status"] == "awake"
        assert (await client.get("/is_paused")).json == {"is_paused": False}

    play(what)


def test_readers_of_events_know_what_kept_requests_hold() -> None:
    async def what(client: Client, server: Server) -> None:
        core, (sender,) = server.worker.cores[0], server.worker.senders
        there: set[int] = set()

        def hear(events: Iterable[PublishedEvent], **_: object) -> None:
            for event in events:
                if isinstance(event, Stored):
                    there.update(block.sequence_hash for block in event.blocks)
                elif isinstance(event, Removed):
                    there.difference_update(block.sequence_hash for block in event.blocks)
                else:
                    there.clear()

        sender._publisher.publish_events = hear  # type: ignore[method-assign]
        await client.post(C, SHORT)
        kept = await ask(client, server, LONG, runs=True)
        for query in ("/pause?mode=keep", "/sleep?mode=keep"):
            assert (await client.post(query, None)).status == 200
            before = core.steps
            await client.post("/wake_up", None)
            await until(lambda before=before: core.steps > before)  # type: ignore[misc]
            assert there
            assert there == {int(value) for value in core.vllm.resident_hashes()}
        hurry(server)
        assert (await kept).status == 200
        await client.post("/pause", None)
        await client.post("/resume", None)
        assert core.vllm.resident_hashes() == []
        await client.post(C, SHORT)
        assert there == {int(value) for value in core.vllm.resident_hashes()}

    play(what, kv_events_config={"enable_kv_cache_events": True, "endpoint": "tcp://*:0"})


def test_readers_of_events_know_what_lies_below_the_device_after_a_reset() -> None:
    below = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 24}], "kv_bytes_per_token": 2000})
    engine = msgspec.structs.replace(ONE_BY_ONE, num_gpu_blocks=16, max_model_len=256)

    async def main() -> None:
        given = {"engine": engine, "max_model_len": 256, "tiers": below, "dev_mode": True}
        async with serving(
            kv_events_config={"enable_kv_cache_events": True, "endpoint": "tcp://*:0"}, **given
        ) as (client, server):
            core, (sender,) = server.worker.cores[0], server.worker.senders
            there: dict[Tier, set[int]] = {Tier.G1: set(), Tier.G2: set()}
            unheard: set[int] = set()  # blocks that left and had never come

            def hear(events: Iterable[PublishedEvent], **_: object) -> None:
                for event in events:
                    if isinstance(event, Stored):
                        there[event.tier] |= {block.sequence_hash for block in event.blocks}
                    elif isinstance(event, Removed):
                        values = {block.sequence_hash for block in event.blocks}
                        unheard.update(values - there[event.tier])
                        there[event.tier] -= values
                    else:
                        for blocks in there.values():
                            blocks.clear()

            sender._publisher.publish_events = hear  # type: ignore[method-assign]

            def prompt(seed: int) -> dict[str, Any]:
                return {"prompt": [seed * 1000 + n for n in range(100)], "max_tokens": 2}

            for seed in range(4):
                await client.post(C, prompt(seed))
            assert there[Tier.G2]
            await client.post("/pause?mode=keep&clear_cache=false", None)
            queued = await ask(client, server, prompt(7), runs=False)
            assert (await client.post("/reset_prefix_cache", None)).json == {"success": True}
            assert core.vllm.resident_hashes() == []
            await client.post("/resume", None)
            assert (await queued).status == 200
            for seed in range(8, 16):
                await client.post(C, prompt(seed))
                assert there[Tier.G1] == {int(value) for value in core.vllm.resident_hashes()}
            assert not unheard
            await until(lambda: core.engine.next_landing_ns() is None)
            _, active, inactive, _ = core.vllm.tier_blocks(Tier.G2)
            assert len(there[Tier.G2]) == active + inactive

    asyncio.run(main())


def test_who_waits_for_a_pause_and_goes_leaves_it_as_it_is() -> None:
    async def what(client: Client, server: Server) -> None:
        running = await ask(client, server, LONG, runs=True)
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        writer.write(b"POST /pause?mode=wait HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
        await until(lambda: server.worker.pauses.paused)
        writer.close()
        await reader.read()
        hurry(server)
        assert (await running).status == 200
        assert (await client.get("/is_paused")).json == {"is_paused": True}
        assert not server.app.answering
        await client.post("/resume", None)

    play(what)


def test_a_worker_that_dies_in_a_pause_is_still_paused() -> None:
    async def what(client: Client, server: Server) -> None:
        running = await ask(client, server, LONG, runs=True)
        paused = asyncio.create_task(client.post("/pause?mode=wait", None))
        await until(lambda: server.worker.pauses.paused)
        server.worker.kill()
        assert (await running).status == 500
        assert (await paused).status == 200
        queued = await ask(client, server, SHORT, runs=False)
        assert await still_open(queued)
        await client.post("/resume", None)
        assert (await queued).status == 200

    play(what)

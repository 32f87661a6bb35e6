"""The standalone router, in front of our own servers: routed by their events, and honest about what it knows."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from server.client import Client, serving
from server.router_scene import EVENTS, C, Scene, play, scene
from understudy.errors import ConfigError
from understudy.proxy.address import WorkerAddress
from understudy.proxy.service import RouterService, RouterSettings
from understudy.router import KvRouting, Router


def test_prompts_go_to_where_their_blocks_are() -> None:
    async def test(told: Scene) -> None:
        prompts = [[seed * 1000 + place for place in range(320)] for seed in range(3)]
        for prompt in prompts:
            reply = await told.client.post(C, {"prompt": prompt, "max_tokens": 1})
            home = int(reply.headers["x-understudy-worker"])

            async def known(home: int = home, prompt: list[int] = prompt) -> bool:
                rows = (await told.client.post("/query", {"token_ids": prompt})).json["workers"]
                return bool(rows[home]["held"]["device"] == 20)

            await told.until(known)
            again = await told.client.post(C, {"prompt": [*prompt, 5, 6], "max_tokens": 1})
            assert (again.headers["x-understudy-worker"], again.headers["x-understudy-overlap-blocks"]) == (
                str(home),
                "20",
            )
            asked = (await told.client.post("/query", {"token_ids": prompt})).json
            assert (asked["blocks"], asked["block_size"]) == (20, 16)
            assert [row["held"]["device"] for row in asked["workers"]][home] == 20

        async def live() -> bool:
            return set(await told.states()) == {"live"}

        await told.until(live)

    play(test, 2)


def test_text_is_tokenized_by_the_engine_or_here() -> None:
    async def test(told: Scene) -> None:
        text = "the quick brown fox " * 40
        chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        for path, body in ((C, {"prompt": text, "max_tokens": 1}), ("/v1/chat/completions", chat)):
            first = await told.client.post(path, body)
            blocks = first.json["usage"]["prompt_tokens"] // 16

            async def known(path: str = path, body: Any = body, blocks: int = blocks) -> bool:
                row = (await told.client.post("/query", body)).json
                return bool(max(one["held"]["device"] for one in row["workers"]) == blocks)

            await told.until(known)
        assert told.service.proxy.counts["untokenized"] == 0

    play(test, 2)
    play(test, 2, tokenizer="builtin")


def test_errors_and_other_paths_are_the_engines_own() -> None:
    async def test(told: Scene) -> None:
        direct = Client(told.servers[0].port)
        for path, body in (
            (C, {"prompt": "x", "max_tokens": -1}),
            (C, {"model": "nope", "prompt": "x"}),
            ("/v1/nope", {}),
        ):
            here, there = await told.client.post(path, body), await direct.post(path, body)
            assert (here.status, here.json) == (there.status, there.json)
        assert (await told.client.get("/v1/models")).json["data"][0]["id"] == "stub"
        assert (await told.client.get("/health")).status == 200
        page = (await told.client.get("/metrics")).body.decode()
        assert 'understudy:router_view{rank="0",state="live",worker="http://127.0.0.1:' in page
        bad = await told.client.post("/query", {"token_ids": "no"})
        assert bad.status == 400
        assert (await told.client.post(C, b"{nope")).status == 400

    play(test, 1)


def test_an_engine_that_is_away_is_left_out_and_comes_back() -> None:
    async def test(told: Scene) -> None:
        async def up(wanted: bool) -> bool:
            return (await told.dump())["workers"][1]["up"] is wanted

        async def homes() -> set[str]:
            replies = [await told.client.post(C, {"prompt": "x", "max_tokens": 1}) for _ in range(4)]
            assert [reply.status for reply in replies] == [200] * 4
            return {reply.headers["x-understudy-worker"] for reply in replies}

        told.servers[1].app.dead = True  # it still listens, and says so
        await told.until(lambda: up(False))
        assert await homes() == {"0"}
        told.servers[1].app.dead = False
        await told.until(lambda: up(True))
        assert await homes() == {"0", "1"}
        _cut(told, 1)
        assert await homes() == {"0"}  # who met it went to the other one
        row = (await told.dump())["workers"][1]
        assert not row["up"]
        assert "cannot be reached" in row["why_down"]
        _cut(told, 0)

        async def refused() -> bool:  # a look at its health may have kept a connection, which serves one more
            return (await told.client.post(C, {"prompt": "x", "max_tokens": 1})).status == 503

        await told.until(refused)
        gone = await told.client.post(C, {"prompt": "x", "max_tokens": 1})
        assert (gone.status, gone.json["error"]["type"]) == (503, "Service Unavailable")
        assert (await told.client.get("/health")).status == 503

    play(test, 2, "round_robin")


def _cut(told: Scene, worker: int) -> None:
    """It cannot be reached any more."""
    listening = told.servers[worker]._listening
    assert listening is not None
    listening.close()
    told.service.workers.all[worker].upstream.close()


def test_engines_register_and_leave_while_it_runs() -> None:
    async def test(told: Scene) -> None:
        async with serving(kv_events_config=EVENTS) as (_, server):
            url = f"http://127.0.0.1:{server.port}"
            assert (await told.client.post("/register", {"url": url})).json["registered"][0]["worker"] == 1
            twice = await told.client.post("/register", {"url": url})
            assert (twice.status, "already" in twice.json["error"]["message"]) == (400, True)
            assert (await told.client.post("/register", {"colour": 1})).status == 400
            assert (await told.client.post("/register", {"url": "http://127.0.0.1:1"})).status == 400
            for _ in range(4):
                await told.client.post(C, {"prompt": "x", "max_tokens": 1})
            assert server.worker.metrics[0].generation_tokens.value == 2
            assert (await told.client.post("/unregister", {"url": url})).status == 200
            assert (await told.client.post("/unregister", {"url": url})).status == 404
            assert len((await told.dump())["workers"]) == 1
        assert (await told.client.post(C, {"prompt": "x", "max_tokens": 1})).status == 200

    play(test, 1, "round_robin")


def test_requests_wait_in_it_and_all_are_answered() -> None:
    async def test(told: Scene) -> None:
        tasks = [
            asyncio.create_task(told.client.post(C, {"prompt": [n] * 200, "max_tokens": 2})) for n in range(8)
        ]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, told.service.dispatcher.num_waiting)
            await asyncio.sleep(0.001)
        assert most > 0
        assert [task.result().status for task in tasks] == [200] * 8

    play(test, 2, KvRouting(queue_threshold=0.0))


class _Sticky(Router):
    """Where most of the prompt is, by what it heard."""

    def __init__(self) -> None:
        self.known: dict[int, set[int]] = {0: set(), 1: set()}

    def observe(self, batch: Any) -> None:
        for kind, value in zip(
            batch.events.kinds.tolist(), batch.events.sequence_hashes.tolist(), strict=True
        ):
            (self.known[batch.worker].add if kind == 0 else self.known[batch.worker].discard)(value)

    def choose(self, request: Any, view: Any) -> int:
        names = request.prompt_blocks.sequence_hashes.tolist()
        hits = [sum(name in self.known[worker] for name in names) for worker in range(len(view))]
        return max(range(len(view)), key=lambda worker: (hits[worker], -view.outstanding_tokens[worker]))


def test_a_router_in_python_works_here_unchanged() -> None:
    router = _Sticky()

    async def test(told: Scene) -> None:
        direct = Client(told.servers[1].port)
        await direct.post(C, {"prompt": list(range(320)), "max_tokens": 1})

        async def heard() -> bool:
            return len(router.known[1]) == 20

        await told.until(heard)
        reply = await told.client.post(C, {"prompt": list(range(320)), "max_tokens": 1})
        assert reply.headers["x-understudy-worker"] == "1"
        assert "x-understudy-overlap-blocks" not in reply.headers  # only the router's own code knows it
        assert (await told.dump())["routing"] == "_Sticky"

    play(test, 2, router)


@pytest.mark.parametrize("policy", ["kv", "least_loaded", KvRouting()])
def test_a_dump_names_the_policy(policy: str | KvRouting) -> None:
    async def test(told: Scene) -> None:
        assert (await told.dump())["routing"] == (policy if isinstance(policy, str) else "kv")

    play(test, 1, policy)


def test_engines_that_come_after_the_router_are_taken_when_they_are_ready() -> None:
    async def main() -> None:
        async with serving(kv_events_config=EVENTS) as (_, server):
            server.app.dead = True  # it answers, and is not ready
            url, nobody = f"http://127.0.0.1:{server.port}", "http://127.0.0.1:9"
            addresses = (WorkerAddress(url=url), WorkerAddress(url=nobody))
            settings = RouterSettings(
                workers=addresses, routing="kv", port=0, silence_s=60, look_every_s=0.05, awaits_workers=True
            )
            service = RouterService(settings)
            await service.start()
            told = Scene(service, [server])
            try:
                before = await told.dump()
                assert before["workers"] == []
                assert [row["url"] for row in before["awaited"]] == [url, nobody]
                assert ["503" in row["why"] for row in before["awaited"]] == [True, False]
                assert (await told.client.get("/health")).status == 503
                early = await told.client.post(C, {"prompt": "x", "max_tokens": 1})
                assert (early.status, early.json["error"]["type"]) == (503, "Service Unavailable")
                server.app.dead = False

                async def come() -> bool:
                    return [row["url"] for row in (await told.dump())["workers"]] == [url]

                await told.until(come)
                assert [row["url"] for row in (await told.dump())["awaited"]] == [nobody]
                assert (await told.client.post(C, {"prompt": "x", "max_tokens": 1})).status == 200

                async def heard() -> bool:
                    return await told.states() == ["live"]

                await told.until(heard)
                assert (await told.client.post("/unregister", {"url": nobody})).status == 200
                assert (await told.dump())["awaited"] == []
            finally:
                await service.stop()

    asyncio.run(main())


def test_what_cannot_be_routed_to_is_refused_at_the_start() -> None:
    async def start(**settings: Any) -> None:
        service = RouterService(RouterSettings(port=0, **settings))
        await service.start()

    with pytest.raises(ConfigError, match="cannot be reached"):
        asyncio.run(start(workers=(WorkerAddress(url="http://127.0.0.1:9"),)))
    with pytest.raises(ConfigError, match="is not the URL of an engine"):
        asyncio.run(start(workers=(WorkerAddress(url="ftp://x"),)))
    with pytest.raises(ConfigError, match="choose one of"):
        asyncio.run(start(routing="best"))

    async def mixed() -> None:
        async with scene(1, block_size=32):
            pass

    with pytest.raises(ConfigError, match="blocks of 16 tokens"):
        asyncio.run(mixed())


def test_addresses_name_events_and_replay() -> None:
    whole = WorkerAddress.parse("http://a:1=tcp://a:2+tcp://a:3")
    assert (whole.url, whole.events, whole.replay) == ("http://a:1", "tcp://a:2", "tcp://a:3")
    assert WorkerAddress.parse("http://a:1") == WorkerAddress(url="http://a:1")

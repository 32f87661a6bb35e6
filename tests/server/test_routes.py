"""Routes beside those that generate: descriptions, developer mode, adapters, metrics by name."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import msgspec

from server.client import QUICK, serving
from understudy.engines.timing import Constant
from understudy.server.api.openapi import describe
from understudy.server.release import NEWEST

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from server.client import Client

C = "/v1/completions"
SLOW = msgspec.structs.replace(QUICK, timing=Constant(prefill_ms=1.0, decode_ms=20.0))
"""What is to be aborted is still there when a busy machine comes to it."""


def talk(what: Callable[[Client], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with serving(**settings) as (client, _):
            await what(client)

    asyncio.run(main())


def test_the_document_names_every_route_and_all_that_it_refers_to_is_in_it() -> None:
    async def what(client: Client) -> None:
        reply = await client.get("/openapi.json")
        told = reply.json
        assert reply.headers["content-type"] == "application/json"
        assert told["openapi"].startswith("3.1")
        assert set(told["info"]) == {"title", "version"}
        for path in (C, "/v1/models", "/health", "/metrics", "/tokenize", "/sleep", "/v1/load_lora_adapter"):
            assert path in told["paths"], path
        names = []
        for path, methods in told["paths"].items():
            assert path.startswith("/")
            for method, answer in methods.items():
                assert method in ("get", "post"), (path, method)
                assert answer["responses"]
                names.append(answer["operationId"])
        assert len(names) == len(set(names))
        text = reply.body.decode()
        for name in set(re.findall(r'"\$ref":"#/components/schemas/(\w+)"', text)):
            assert name in told["components"]["schemas"]
        fields = told["components"]["schemas"]["CompletionRequest"]["properties"]
        assert fields["max_tokens"] == {"anyOf": [{"type": "integer"}, {"type": "null"}]}
        assert fields["truncation_side"]["anyOf"][0]["enum"] == ["left", "right"]

    talk(what, dev_mode=True, runtime_lora=True)


def test_a_document_of_no_routes_is_one() -> None:
    assert describe(NEWEST, {})["paths"] == {}


def test_the_page_lists_the_routes_and_loads_nothing_from_elsewhere() -> None:
    async def what(client: Client) -> None:
        for path in ("/docs", "/redoc"):
            page = await client.get(path)
            assert page.headers["content-type"] == "text/html; charset=utf-8"
            text = page.body.decode()
            assert f"<code>{C}</code>" in text
            assert "http://" not in text
            assert "https://" not in text

    async def without(client: Client) -> None:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert (await client.get(path)).status == 404

    talk(what)
    talk(without, disable_fastapi_docs=True)


def test_metrics_are_told_by_name_where_they_are_asked_for_by_other_ways_than_the_usual() -> None:
    async def what(client: Client) -> None:
        usual = await client.get("/metrics?name[]=vllm:num_requests_running")
        assert usual.body.count(b"# TYPE") > 50
        assert usual.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
        named = await client.get("/metrics/?name[]=vllm:num_requests_running&name[]=vllm:prompt_tokens_total")
        assert named.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        lines = named.body.decode().splitlines()
        assert [line.split(" ")[2] for line in lines if line.startswith("# TYPE")] == [
            "vllm:num_requests_running",
            "vllm:prompt_tokens_total",
        ]
        assert len(lines) == 6
        assert (await client.post("/metrics", None)).body.count(b"# TYPE") > 50

    talk(what)


def test_adapters_come_and_go_by_sagemakers_routes() -> None:
    async def what(client: Client) -> None:
        assert (await client.post("/adapters", {"name": "a b", "src": "/x"})).status == 200
        models = (await client.get("/v1/models")).json["data"]
        assert [model["id"] for model in models] == ["stub", "a b"]
        header = {"X-Amzn-SageMaker-Adapter-Identifier": "a b"}
        told = await client.ask("POST", "/invocations", {"prompt": "x", "max_tokens": 1}, headers=header)
        assert told.json["model"] == "a b"
        assert (await client.ask("DELETE", "/adapters/a%20b")).status == 200
        assert (await client.ask("DELETE", "/adapters/a%20b")).status == 404

    talk(what, runtime_lora=True)


def test_weights_have_a_version_that_updates_change() -> None:
    async def what(client: Client) -> None:
        async def version() -> Any:
            return (await client.get("/weight_info")).json["weight_version"]

        assert await version() == "default"
        await client.post("/update_weights", {"update_info": {}})
        await client.post("/finish_weight_update", {})
        assert await version() == "default"
        await client.post("/finish_weight_update", {"weight_version": "v2"})
        assert await version() == "v2"
        told = await client.post("/update_weight_version", {"new_version": "v3"})
        assert told.json == {"success": True, "new_version": "v3"}
        assert await version() == "v3"
        assert (await client.post("/weight_checker", {"action": "compare", "baseline": {"w": "1"}})).json == {
            "match": False,
            "mismatches": ["w"],
        }
        assert (await client.post("/collective_rpc", {"method": "reset"})).json == {"results": [None, None]}
        assert (await client.get("/get_world_size")).json == {"world_size": 2}
        assert (await client.get("/get_world_size?include_dp=false")).json == {"world_size": 1}

    talk(what, dev_mode=True, data_parallel_size=2)


def test_requests_are_aborted_by_name_or_all() -> None:
    async def main() -> None:
        async with serving(dev_mode=True, engine=SLOW) as (client, server):
            body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}
            asked = [
                asyncio.create_task(client.post(C, body, x_request_id=name))
                for name in ("one", "two", "three")
            ]
            while len(server.worker.live()) < 3:
                await asyncio.sleep(0.01)
            names = [request.name for request in server.worker.live()]
            # One name alone is a name, and not all that it is made of.
            await client.post("/abort_requests", {"request_ids": f"{names[0]} {names[1]}"})
            assert len(server.worker.live()) == 3
            told = await client.post("/abort_requests", {"request_ids": [f"{names[0]}-0", "x"]})
            assert told.json["aborted"] == 2
            while len(server.worker.live()) > 2:
                await asyncio.sleep(0.01)
            assert [request.name for request in server.worker.live()] == names[1:]
            assert (await client.post("/abort_requests", {})).json == {"status": "aborted", "aborted": 2}
            replies = [reply.json for reply in await asyncio.gather(*asked)]
            assert {reply["choices"][0]["finish_reason"] for reply in replies} == {"abort"}
            for reply in replies:  # what there was
                assert len(reply["choices"][0]["text"].split()) == reply["usage"]["completion_tokens"] < 2000
            assert server.worker.live() == []
            assert server.worker.cores[0].vllm.pool[1] == 0
            counted = server.worker.metrics[0].success.values()
            assert sum(counter.value for counter in counted) == 0

    asyncio.run(main())


def test_a_stream_that_is_aborted_says_so_in_its_last_chunk() -> None:
    async def main() -> None:
        async with serving(dev_mode=True, engine=SLOW) as (client, server):
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2000, "stream": True}
            asked = asyncio.create_task(client.post("/v1/chat/completions", {**body, "ignore_eos": True}))
            while not server.worker.live() or server.worker.live()[0].emitted < 3:
                await asyncio.sleep(0.01)
            await client.post("/abort_requests", {})
            events = (await asked).events
            assert events[-1] == "[DONE]"
            assert [event["choices"][0]["finish_reason"] for event in events[-3:-1]] == [None, "abort"]

    asyncio.run(main())


def test_a_pause_aborts_keeps_or_waits_for_what_is_there() -> None:
    async def main() -> None:
        engine = msgspec.structs.replace(QUICK, vllm_version="0.32")  # 0.33 rejects later requests
        async with serving(dev_mode=True, engine=engine) as (client, server):
            body = {"prompt": list(range(40)), "ignore_eos": True}
            # The first would take four seconds: it is still there when a busy machine comes to it.
            for mode, tokens, finish in (
                ("abort", 4000, "abort"),
                ("keep", 300, "length"),
                ("wait", 300, "length"),
            ):
                asked = asyncio.create_task(client.post(C, {**body, "max_tokens": tokens}))
                while not asked.done() and not any(one.emitted for one in server.worker.live()):
                    await asyncio.sleep(0.005)
                assert (await client.post(f"/pause?mode={mode}", None)).json == {"status": "paused"}
                if mode == "wait":
                    await asked
                    await asyncio.sleep(0.02)
                assert (await client.get("/is_paused")).json == {"is_paused": True}
                late = asyncio.create_task(client.post(C, {**body, "max_tokens": 1}))
                await asyncio.sleep(0.05)
                assert not late.done()
                assert (await client.post("/resume", None)).json == {"status": "resumed"}
                assert (await asked).json["choices"][0]["finish_reason"] == finish
                assert (await late).status == 200
                assert (await client.get("/is_paused")).json == {"is_paused": False}

    asyncio.run(main())

"""Faults of a live fleet: workers killed, connections dropped, lines slowed; no request is lost."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from server.client import Client
from server.fleet_scene import C, run, vanish

if TYPE_CHECKING:
    from understudy.fleets.fleet import Fleet


def test_faults_happen_where_they_were_ordered_and_end() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        body = {"prompt": "x", "max_tokens": 2}
        one, two = (Client(server.port) for server in fleet.servers)
        told = await client.post("/admin/fault", {"kind": "reject", "status": 429, "workers": [0]})
        assert told.json["workers"] == [0]
        assert (await one.post(C, body)).status == 429
        assert (await two.post(C, body)).status == 200
        await client.post("/admin/fault", {"kind": "none"})
        assert (await one.post(C, body)).status == 200
        await client.post("/admin/fault", {"kind": "delay", "delay_ms": 200, "workers": [1]})
        began = asyncio.get_running_loop().time()
        assert (await two.post(C, body)).status == 200
        assert asyncio.get_running_loop().time() - began >= 0.2
        bad = await client.post("/admin/fault", {"kind": "reject", "colour": 1})
        assert (bad.status, bad.json["error"]["type"]) == (400, "Bad Request")
        assert (await client.post("/admin/fault", {"kind": "kill", "workers": [9]})).status == 400
        assert (await one.post(C, body, x_return_error="418")).status == 418

    run(test, 2)


def test_a_killed_worker_loses_its_requests_with_an_error_and_goes_on() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        long = {"prompt": "x", "max_tokens": 3000}
        plain = asyncio.create_task(client.post(C, long))
        stream = asyncio.create_task(client.post(C, {**long, "stream": True}))
        await asyncio.sleep(0.15)
        told = await client.post("/admin/fault", {"kind": "kill", "workers": [0]})
        assert told.json["lost_requests"] == 2
        assert ((await plain).status, (await plain).json["error"]["type"]) == (500, "InternalServerError")
        *_, error, done = (await stream).events
        assert error["error"]["code"] == 500
        assert done == "[DONE]"
        assert (await client.post(C, {"prompt": "x", "max_tokens": 2})).status == 200
        assert [server.worker.cores[0].vllm.pool[1] for server in fleet.servers] == [0]

    run(test, 1)


def test_a_dropped_connection_frees_what_it_held() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        await client.post("/admin/fault", {"kind": "drop", "after_ms": 50})
        with suppress(ConnectionResetError):  # what came before the cut may still be read
            cut = await client.post(C, {"prompt": "x", "max_tokens": 3000, "stream": True})
            assert b"[DONE]" not in cut.body
        await asyncio.sleep(0.1)
        assert fleet.servers[0].worker.live() == []

    run(test, 1)


def test_a_slow_line_delays_every_chunk_and_loses_none() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        body = {"prompt": "x", "max_tokens": 6, "stream": True, "seed": 1}
        plain = await client.post(C, body)
        await client.post("/admin/fault", {"kind": "slow", "delay_ms": 150})
        loop = asyncio.get_running_loop()
        for ask in (body, {**body, "stream": False}):
            began = loop.time()
            slow = await client.post(C, ask)
            assert slow.status == 200
            assert loop.time() - began >= 0.15
            if ask["stream"]:
                texts = [[e["choices"][0]["text"] for e in reply.events[:-1]] for reply in (plain, slow)]
                assert texts[0] == texts[1]
        await vanish(client, body, 0.05)  # while all of it is on its way
        await asyncio.sleep(0.2)
        await client.post("/admin/fault", {"kind": "none"})
        began = loop.time()
        assert (await client.post(C, body)).status == 200
        assert loop.time() - began < 0.15
        assert fleet.servers[0].worker.live() == []

    run(test, 1)


def test_settings_change_while_it_runs_and_a_wrong_one_changes_nothing() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        worker = Client(fleet.servers[0].port)
        turned = await worker.post("/admin/config", {"inter-token-latency": 30, "failure-injection-rate": 0})
        assert turned.json["inter-token-latency"] == 30
        began = asyncio.get_running_loop().time()
        await worker.post(C, {"prompt": "x", "max_tokens": 5})
        assert asyncio.get_running_loop().time() - began >= 0.1
        wrong = await worker.post("/admin/config", {"inter-token-latency": 1, "colour": "red"})
        assert wrong.status == 400
        assert (await worker.get("/admin/config")).json["inter-token-latency"] == 30
        await worker.post("/admin/config", {"failure-injection-rate": 1, "failure-types": ["rate_limit"]})
        assert (await worker.post(C, {"prompt": "x"})).status == 429
        await worker.post("/admin/config", {"fake-metrics": {"waiting-requests": 7}})
        page = (await worker.get("/metrics")).body.decode()
        assert 'vllm:num_requests_waiting{engine="0",model_name="stub"} 7.0' in page

    run(test, 1, latency_ms=(1.0, 1.0))


def test_nothing_is_lost_among_cancels_kills_and_rejections() -> None:
    async def test(client: Client, fleet: Fleet) -> None:
        async def one(number: int) -> str:
            body = {"prompt": [number % 7] * 50, "max_tokens": 20 + number % 40, "stream": number % 2 == 0}
            if number % 5 == 4:
                await vanish(client, body, 0.03)
                return "cancelled"
            reply = await client.post(C, body)
            failed = reply.status != 200 or b'"error"' in reply.body
            return "failed" if failed else "completed"

        tasks = [asyncio.create_task(one(number)) for number in range(60)]
        await asyncio.sleep(0.05)
        await client.post("/admin/fault", {"kind": "kill", "workers": [1]})
        ends = await asyncio.gather(*tasks)
        assert len(ends) == 60
        assert "completed" in ends
        await asyncio.sleep(0.2)
        for server in fleet.servers:
            assert server.worker.live() == []
            assert not server.app.endpoints.in_flight
            assert server.worker.cores[0].vllm.pool[1] == 0

    run(test, 3, "kv")

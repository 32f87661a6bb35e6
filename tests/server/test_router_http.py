"""The standalone router as a proxy: what of an answer is the engine's, and what its own."""

from __future__ import annotations

import asyncio
import json

from server.client import Client, serving
from server.router_scene import C, Scene, play
from understudy.proxy.address import WorkerAddress
from understudy.proxy.service import RouterService, RouterSettings
from understudy.proxy.upstream import Upstream


def test_headers_of_an_answer_are_passed_on() -> None:
    async def main() -> None:
        async with serving(enable_request_id_headers=True, allowed_origins=("http://a",)) as (_, server):
            address = WorkerAddress(url=f"http://127.0.0.1:{server.port}")
            service = RouterService(RouterSettings(workers=(address,), routing="round_robin", port=0))
            await service.start()
            try:
                client = Client(service.port)
                asked = {"x-request-id": "mine", "origin": "http://a", "endpoint-load-metrics-format": "TEXT"}
                for stream in (False, True):
                    body = {"prompt": "x", "max_tokens": 1, "stream": stream}
                    told = (await client.ask("POST", C, body, headers=asked)).headers
                    assert told["x-request-id"] == "mine"
                    assert told["access-control-allow-origin"] == "http://a"
                    assert told["vary"] == "Origin"
                    assert ("endpoint-load-metrics" in told) == (not stream)
                    assert told["x-understudy-worker"] == "0"
                preflight = {"origin": "http://a", "access-control-request-method": "POST"}
                told = (await client.ask("OPTIONS", C, headers=preflight)).headers
                assert "POST" in told["access-control-allow-methods"]
                wrong = await client.ask("GET", C)
                assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
                data = b"GET /version HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"
                reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
                writer.write(data)
                head = (await asyncio.wait_for(reader.read(), 10)).lower().partition(b"\r\n\r\n")[0]
                writer.close()
                for once in (b"\r\ndate:", b"\r\nserver:", b"\r\ncontent-type:", b"\r\ncontent-length:"):
                    assert head.count(once) == 1
            finally:
                await service.stop()

    asyncio.run(main())


def test_an_engine_at_an_address_of_ipv6_is_named_as_a_url() -> None:
    assert Upstream("http://[::1]:8000").url == "http://[::1]:8000"
    assert Upstream("http://[::1]").host == "::1"
    assert Upstream("gpu1:8000").url == "http://gpu1:8000"


def test_streams_are_passed_on_as_they_come() -> None:
    async def test(told: Scene) -> None:
        direct = Client(told.servers[0].port)
        body = {"prompt": "hello there", "max_tokens": 5, "stream": True, "seed": 3}
        there, here = await direct.post(C, body), await told.client.post(C, body)
        texts = [[event["choices"][0]["text"] for event in reply.events[:-1]] for reply in (there, here)]
        assert texts[0] == texts[1]
        assert here.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert here.headers["transfer-encoding"] == "chunked"
        # A chunk leaves when it comes, not with the last.
        reader, writer = await asyncio.open_connection("127.0.0.1", told.client.port)
        data = json.dumps({**body, "max_tokens": 3000}).encode()
        head = f"POST {C} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        await asyncio.wait_for(reader.readuntil(b"data: "), 5)
        assert told.servers[0].worker.live()
        writer.close()  # and a client that goes away frees its blocks there

        async def idle() -> bool:
            return not told.servers[0].worker.live()

        await told.until(idle)
        assert told.service.dispatcher.outstanding.requests == [0]
        kv = told.service.dispatcher.kv
        assert kv is not None
        assert not kv.active_blocks.any()

    play(test, 1)

"""A toy engine that implements only the required calls of the interface also runs live, over HTTP."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from engines.toy_kind import ToyConfig
from server.client import QUICK, Client
from understudy import _core
from understudy.engines.timing import Constant
from understudy.errors import ConfigError
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.kind_names import KIND_MODULES
from understudy.router import KvRouting
from understudy.server.engines import SimulatedCore
from understudy.server.server import Server
from understudy.server.settings import ServerSettings
from understudy.tiers.native import to_core
from understudy.tiers.plan import TierPlan
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.skipif(
    not hasattr(_core, "ToyEngineConfig"), reason="built without UNDERSTUDY_TEST_ENGINES"
)


@pytest.fixture(autouse=True)
def toy_is_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KIND_MODULES, "toy", "engines.toy_kind")


C = "/v1/completions"


def toy(**settings: Any) -> ToyConfig:
    given = {"max_running": 2, "queue_limit": 100, "timing": QUICK.timing, **settings}
    return ToyConfig(block_size=16, num_gpu_blocks=1024, max_model_len=4096, **given)


def settings_of(engine: ToyConfig) -> ServerSettings:
    return ServerSettings(model="toy", port=0, engine=engine, max_model_len=4096)


def serve(test: Callable[[Client, Server], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        server = Server(settings_of(toy(**settings)))
        await server.start()
        try:
            await test(Client(server.port), server)
        finally:
            await server.stop(0)
            server.runtime.driver.stop()

    asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.002)


def test_the_toy_engine_answers_whole_and_as_a_stream() -> None:
    async def test(client: Client, server: Server) -> None:
        assert not isinstance(server.worker.cores[0].engine, _core.VllmEngine)
        asked = {"prompt": list(range(40)), "max_tokens": 5, "ignore_eos": True}
        whole = (await client.post(C, asked)).json
        assert whole["usage"]["completion_tokens"] == 5
        assert whole["choices"][0]["finish_reason"] == "length"
        events = (await client.post(C, {**asked, "stream": True})).events
        assert events[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == whole["choices"][0]["text"]
        page = (await client.get("/metrics")).body.decode()
        counts = {
            line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if "engine=" in line
        }
        assert counts["vllm:generation_tokens_total"] == 10
        assert counts["vllm:prompt_tokens_total"] == 80
        assert counts["vllm:num_requests_running"] == 0

    serve(test)


def test_a_client_that_disconnects_cancels_its_request_in_the_toy_engine() -> None:
    async def test(client: Client, server: Server) -> None:
        core = server.worker.cores[0]
        reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
        body = msgspec.json.encode(
            {"prompt": [1, 2, 3], "max_tokens": 4000, "ignore_eos": True, "stream": True}
        )
        writer.write(
            b"POST %b HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (C.encode(), len(body), body)
        )
        await reader.read(100)
        assert len(core.live) == 1
        writer.close()
        await until(lambda: core.is_idle and not core.live)
        assert core.num_running == 0
        assert core.steps < 4000

    serve(test)


def test_a_request_that_the_engine_aborts_inside_another_submit_gets_its_answer() -> None:
    async def test(client: Client, server: Server) -> None:
        core = server.worker.cores[0]
        asked = {"prompt": [1, 2, 3], "ignore_eos": True}
        replies = []
        for number in range(5):  # two run until they are cancelled, one waits: each further one ends it
            body = {**asked, "max_tokens": 4000 if number < 2 else 60, "stream": number == 3}
            replies.append(asyncio.create_task(client.post(C, body)))
            await until(lambda number=number: core._next_id == number + 1)  # type: ignore[misc]
            await until(lambda number=number: core.num_running == min(number + 1, 2))  # type: ignore[misc]
        whole, streamed = (await replies[2]).json, (await replies[3]).events
        assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["text"]) == ("abort", "")
        assert whole["usage"]["completion_tokens"] == 0
        assert streamed[0]["choices"][0]["finish_reason"] == "abort"
        assert streamed[-1] == "[DONE]"
        for number in (0, 1):
            replies[number].cancel()
        await asyncio.gather(*replies[:2], return_exceptions=True)
        assert (await replies[4]).json["usage"]["completion_tokens"] == 60

    serve(test, queue_limit=1, timing=Constant(prefill_ms=5.0, decode_ms=5.0))


def test_the_kv_router_follows_the_events_of_live_toy_engines() -> None:
    async def main() -> None:
        fleet = Fleet(
            FleetSettings(pools=((3, settings_of(toy())),), base_port=0, port=0, routing=KvRouting())
        )
        await fleet.start()
        try:
            client = Client(fleet.port)
            prompts = [[seed * 1000 + place for place in range(320)] for seed in range(4)]
            first = [await client.post(C, {"prompt": prompt, "max_tokens": 1}) for prompt in prompts]
            again = [await client.post(C, {"prompt": prompt, "max_tokens": 1}) for prompt in prompts]
            assert [reply.status for reply in [*first, *again]] == [200] * 8
            workers = [reply.headers["x-understudy-worker"] for reply in first]
            assert [reply.headers["x-understudy-worker"] for reply in again] == workers
            assert len(set(workers)) > 1
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()

    asyncio.run(main())


def test_tiers_below_an_engine_without_tiers_are_an_error() -> None:
    tiers = {"tiers": [{"tier": "g2", "blocks": 64}], "kv_bytes_per_token": 1024}
    plan = TierPlan.of(TiersConfig.from_dict(tiers), 16)
    assert plan is not None
    with pytest.raises(ConfigError, match="tiers, check and kv_cache_metrics"):
        SimulatedCore(toy(), tiers=to_core(plan, 1 << 12))

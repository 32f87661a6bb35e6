"""Whatever a client sends, the server answers, loses nothing and goes on."""

from __future__ import annotations

import asyncio
import os

import pytest

from server.client import serving
from server.fuzz import DEVELOPERS, PATHS, play


def fuzz(count: int, seed: int, *, developers: bool = False) -> None:
    async def main() -> None:
        paths = DEVELOPERS if developers else PATHS
        settings = {"runtime_lora": True, "enable_scale_out": True, "dev_mode": developers}
        async with serving(**settings) as (client, server):
            await play(client, count, seed, paths=paths)
            for _ in range(200):
                if not server.app.endpoints.in_flight:
                    break
                await asyncio.sleep(0.02)
            assert not server.app.endpoints.in_flight
            assert server.worker.live() == []
            assert server.worker.cores[0].vllm.pool[1] == 0
            assert not server.app.answering
            assert (await client.get("/health")).status == 200

    asyncio.run(main())


@pytest.mark.parametrize("seed", [1, 2])
def test_malformed_requests_never_harm_the_server(seed: int) -> None:
    fuzz(1500, seed)


def test_malformed_orders_of_developers_never_harm_it_either() -> None:
    fuzz(1000, 3, developers=True)


@pytest.mark.soak
def test_many_malformed_requests() -> None:
    count = int(os.environ.get("UNDERSTUDY_FUZZ", "100000"))
    seed = int(os.environ.get("UNDERSTUDY_FUZZ_SEED", "7"))
    fuzz(count - count // 10, seed)
    fuzz(count // 10, seed, developers=True)

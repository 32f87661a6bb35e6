"""An SGLang server for tests, with quick steps."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from server.client import Client, serving
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Constant

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from understudy.server.server import Server

QUICK = SglangConfig(
    block_size=1, num_gpu_blocks=16384, max_model_len=4096, timing=Constant(prefill_ms=1.0, decode_ms=1.0)
)


def serve(test: Callable[[Client, Server], Awaitable[None]], **settings: Any) -> None:
    """Run a test against a server on a free port."""

    async def main() -> None:
        async with serving(**{"engine": QUICK, **settings}) as (client, server):
            await test(client, server)

    asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    """Wait until a condition is met."""
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.002)

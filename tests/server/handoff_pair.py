"""A prefill and a decode server in one event loop, each with a clock, driver and side channel of its own."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.server.flags.serving import read_serve
from understudy.server.server import Server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a router sends to a prefill server."""
FAST = ["--set", "timing.kind=constant", "timing.prefill_ms=4", "timing.decode_ms=2"]


def transfer_config(role: str, **more: Any) -> str:
    """Return a `--kv-transfer-config`."""
    return msgspec.json.encode({"kv_connector": "NixlConnector", "kv_role": role, **more}).decode()


def make_server(role: str, *flags: str, **more: Any) -> Server:
    """Make a server with a role, on free ports."""
    line = [
        *("--port", "0", "--kv-side-channel-port", "0", "--kv-transfer-config"),
        transfer_config(role, **more),
    ]
    return Server(read_serve([*line, *FAST, *flags]).settings)


@contextlib.asynccontextmanager
async def serving(*servers: Server) -> AsyncIterator[None]:
    """Start servers, and stop them at the end."""
    try:
        for server in servers:
            await server.start()
        yield
    finally:
        for server in servers:
            await server.stop()
            server.runtime.driver.stop()


def runs(test: Callable[[], Coroutine[None, None, None]]) -> Callable[[], None]:
    """Run an asynchronous test in an event loop of its own."""

    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)

"""A live server whose KV events a test reads."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from server.client import QUICK, serving
from understudy.events.wire import decode_batch
from understudy.tiers.settings import TiersConfig

C = "/v1/completions"
RUN = list(range(1000, 1048))


class Reader:
    """Reads a server's events one batch at a time."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.linger = 0
        self._socket.connect(endpoint.replace("0.0.0.0", "127.0.0.1"))
        self._socket.subscribe(b"")

    async def next(self) -> tuple[int, Any]:
        _, sequence, payload = await asyncio.wait_for(self._socket.recv_multipart(), 10)
        return int.from_bytes(sequence, "big"), decode_batch(payload)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def run(
    test: Any, *, tiers: TiersConfig | None = None, settings: dict[str, Any] | None = None, **config: Any
) -> None:
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "topic": "kv-events", **config}

    async def main() -> None:
        below = TiersConfig() if tiers is None else tiers
        given = {"kv_events_config": events, "dev_mode": True, "tiers": below, **(settings or {})}
        async with serving(**given) as (client, server):
            sources = (await client.get("/kv_event_sources")).json
            reader = Reader(sources["0"]["endpoint"])
            try:
                await asyncio.sleep(0.3)  # a subscription takes a moment to arrive
                await test(client, server, reader)
            finally:
                reader.close()

    asyncio.run(main())


def release(version: str, **engine: Any) -> dict[str, Any]:
    return {"engine": msgspec.structs.replace(QUICK, vllm_version=version, **engine)}

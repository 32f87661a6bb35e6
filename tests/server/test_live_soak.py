"""A fleet for ten minutes: memory stays flat, nothing is lost, blocks return, events have no gap."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest
import zmq
import zmq.asyncio

from understudy.engines.config import VllmConfig
from understudy.engines.timing import Constant
from understudy.server.fleet.fleet import Fleet, FleetSettings
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from understudy.server.api.endpoints import Endpoints
    from understudy.server.api.generation import Generation

SECONDS = float(os.environ.get("UNDERSTUDY_LIVE_SOAK_S", "600"))
WORKERS = int(os.environ.get("UNDERSTUDY_LIVE_SOAK_WORKERS", "100"))
TOKENS_PER_SECOND = float(os.environ.get("UNDERSTUDY_LIVE_SOAK_RATE", "8000"))


def resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


async def client(
    port: int, until_s: float, draw: random.Random, ends: Counter[str], asked: Counter[str]
) -> None:
    """One stream after the other; now and then it goes away in the middle. Each ends in one way."""
    while time.monotonic() < until_s:
        family = draw.randrange(40)
        prompt = [family * 50 + place for place in range(200)] + draw.choices(range(5000), k=60)
        body = msgspec.json.encode({"prompt": prompt, "max_tokens": draw.randrange(20, 120), "stream": True})
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        asked["requests"] += 1
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: s\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        if draw.random() < 0.05:
            await reader.read(2000)
            writer.close()
            ends["cancelled"] += 1
            continue
        first = answer = await reader.read(1 << 16)
        while data := await reader.read(1 << 16):
            answer = answer[-64:] + data
        writer.close()
        if not first.startswith(b"HTTP/1.1 200"):
            ends["rejected"] += 1
        else:
            ends["completed" if b"[DONE]" in answer and b'"error"' not in answer else "failed"] += 1


async def watch(endpoint: str, context: zmq.asyncio.Context, gaps: Counter[str]) -> None:
    """Sequence numbers of one worker must follow each other."""
    socket = context.socket(zmq.SUB)
    socket.linger = 0
    socket.rcvhwm = 0  # a reader that is late loses nothing
    socket.connect(endpoint.replace("0.0.0.0", "127.0.0.1"))
    socket.subscribe(b"")
    last = -1
    try:
        while True:
            _, sequence, _ = await socket.recv_multipart()
            number = int.from_bytes(sequence, "big")
            gaps["batches"] += 1
            gaps["gaps"] += last >= 0 and number != last + 1
            last = number
    finally:
        socket.close()


def count_ends(endpoints: Endpoints, told: Counter[str]) -> None:
    """How each request ended, as its server has it."""
    ended: set[str] = set()
    usual = endpoints._done

    def done(generation: Generation, how: str) -> None:
        told["twice" if generation.id in ended else how] += 1
        ended.add(generation.id)
        usual(generation, how)

    endpoints._done = done  # type: ignore[method-assign]


@pytest.mark.soak
def test_a_fleet_under_load_keeps_its_memory_and_loses_nothing() -> None:
    streams = WORKERS * 2
    engine = VllmConfig(
        block_size=16,
        num_gpu_blocks=400,
        max_num_seqs=8,
        max_model_len=1024,
        timing=Constant(prefill_ms=5.0, decode_ms=1e3 * streams / TOKENS_PER_SECOND),
    )
    # A publisher keeps its last 10,000 batches unless told: it would still be filling up when ten minutes have passed.
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "buffer_steps": 200}
    pool = ServerSettings(model="soak", engine=engine, max_model_len=1024, kv_events_config=events)
    settings = FleetSettings(pools=((WORKERS, pool),), base_port=0, port=0, routing="kv")

    async def main() -> None:
        fleet = Fleet(settings)
        await fleet.start()
        context = zmq.asyncio.Context()
        gaps: Counter[str] = Counter()
        readers = [
            asyncio.create_task(watch(server.worker.senders[0].endpoint, context, gaps))
            for server in fleet.servers
        ]
        ends: Counter[str] = Counter()
        asked: Counter[str] = Counter()
        told: Counter[str] = Counter()  # what the servers say themselves
        for server in fleet.servers:
            count_ends(server.app.endpoints, told)
        until_s = time.monotonic() + SECONDS
        draw = random.Random(1)
        clients = [
            asyncio.create_task(client(fleet.port, until_s, random.Random(draw.random()), ends, asked))
            for _ in range(streams)
        ]
        await asyncio.sleep(SECONDS * 0.3)
        before_mb = resident_mb()
        await asyncio.gather(*clients)
        await asyncio.sleep(0.5)
        after_mb = resident_mb()
        late = fleet.stage.token_lateness
        tokens = sum(server.worker.metrics[0].generation_tokens.value for server in fleet.servers)
        print(
            f"\n{tokens / SECONDS:,.0f} tokens/s, {dict(ends)}, {dict(told)}, {before_mb:.0f} → {after_mb:.0f} MB, "
            f"late p50 {late.quantile(0.5) * 1e3:.1f} ms, p99 {late.quantile(0.99) * 1e3:.1f} ms, {dict(gaps)}"
        )
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        context.term()
        assert ends["failed"] == ends["rejected"] == 0
        # A client that goes may go too late; no request ends twice, in two ways, or not at all.
        assert sum(ends.values()) == asked["requests"] == told["completed"] + told["cancelled"]
        assert told["completed"] >= ends["completed"]
        assert set(told) <= {"completed", "cancelled"}
        assert ends["completed"] > 0
        assert gaps["gaps"] == 0
        assert gaps["batches"] > 0
        for server in fleet.servers:
            assert server.worker.live() == []
            assert not server.app.endpoints.in_flight
            assert server.worker.cores[0].engine.pool[1] == 0
        assert after_mb < before_mb * 1.15 + 10
        await fleet.stop()
        fleet.stage.driver.stop()

    asyncio.run(main())

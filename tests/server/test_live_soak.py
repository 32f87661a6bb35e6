"""A fleet for ten minutes: memory stays flat, nothing is lost, blocks return, events have no gap."""

from __future__ import annotations

import asyncio
import multiprocessing
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
    from multiprocessing.connection import Connection

    from understudy.server.api.endpoints import Endpoints
    from understudy.server.api.generation import Generation

SECONDS = float(os.environ.get("UNDERSTUDY_LIVE_SOAK_S", "600"))
WORKERS = int(os.environ.get("UNDERSTUDY_LIVE_SOAK_WORKERS", "100"))
STREAMS = 2 * WORKERS
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


def load(port: int, endpoints: list[str], answer: Connection) -> None:
    """All clients and all readers of events, in a process of their own; what they saw goes back."""

    async def main() -> None:
        context = zmq.asyncio.Context()
        gaps: Counter[str] = Counter()
        ends: Counter[str] = Counter()
        asked: Counter[str] = Counter()
        readers = [asyncio.create_task(watch(endpoint, context, gaps)) for endpoint in endpoints]
        await asyncio.sleep(1)  # let them all be there before the first event
        until_s = time.monotonic() + SECONDS
        draw = random.Random(1)
        await asyncio.gather(
            *(client(port, until_s, random.Random(draw.random()), ends, asked) for _ in range(STREAMS))
        )
        await asyncio.sleep(1)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        context.term()
        answer.send((ends, asked, gaps))

    asyncio.run(main())


def count_ends(endpoints: Endpoints, told: Counter[str]) -> None:
    """How each request ended, as its server has it."""
    ended: set[int] = set()
    usual = endpoints._done

    def done(generation: Generation, how: str) -> None:
        name = hash(generation.id)
        told["twice" if name in ended else how] += 1
        ended.add(name)
        usual(generation, how)

    endpoints._done = done  # type: ignore[method-assign]


@pytest.mark.soak
def test_a_fleet_under_load_keeps_its_memory_and_loses_nothing() -> None:
    # A stream also waits for its turn and its first token: steps are shorter by as much as that takes.
    decode_ms = 0.92e3 * STREAMS / TOKENS_PER_SECOND
    engine = VllmConfig(
        block_size=16,
        num_gpu_blocks=400,
        max_num_seqs=8,
        max_model_len=1024,
        timing=Constant(prefill_ms=5.0, decode_ms=decode_ms),
    )
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0"}
    pool = ServerSettings(model="soak", engine=engine, max_model_len=1024, kv_events_config=events)
    settings = FleetSettings(pools=((WORKERS, pool),), base_port=0, port=0, routing="kv")

    async def main() -> None:
        fleet = Fleet(settings)
        await fleet.start()
        told: Counter[str] = Counter()  # what the servers say themselves
        for server in fleet.servers:
            count_ends(server.app.endpoints, told)
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        endpoints = [server.worker.senders[0].endpoint for server in fleet.servers]
        process = spawn.Process(target=load, args=(fleet.port, endpoints, there))
        process.start()
        began_s, seen_mb = time.monotonic(), [(0.0, resident_mb())]
        while not here.poll():
            assert process.is_alive()
            await asyncio.sleep(1)
            seen_mb.append((time.monotonic() - began_s, resident_mb()))
        ends, asked, gaps = here.recv()
        process.join()
        third_s = seen_mb[-1][0] / 3
        early_mb = next(mb for second_s, mb in seen_mb if second_s >= third_s)
        late = fleet.stage.token_lateness
        tokens = sum(server.worker.metrics[0].generation_tokens.value for server in fleet.servers)
        print(
            f"\n{tokens / SECONDS:,.0f} tokens/s, clients {dict(ends)}, servers {dict(told)}, {dict(gaps)}, "
            f"late p50 {late.quantile(0.5) * 1e3:.1f} ms, p99 {late.quantile(0.99) * 1e3:.1f} ms\nMB: "
            + ", ".join(f"{mb:.0f}" for _, mb in seen_mb[:: max(1, len(seen_mb) // 12)])
            + f", {seen_mb[-1][1]:.0f}"
        )
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
        # What is kept is full after a third of the time: device, tokens behind blocks, the router's index.
        assert seen_mb[-1][1] < early_mb * 1.1 + 10
        await fleet.stop()
        fleet.stage.driver.stop()

    asyncio.run(main())

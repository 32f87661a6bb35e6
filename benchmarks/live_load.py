"""Load on one live worker: tokens a second and how late they are, with a client on the same machine.

    python benchmarks/live_load.py [--streams 256] [--tokens-per-second 10000] [--seconds 10]

The server runs in a process of its own with constant step times, so that `streams` concurrent streams ask for the
given rate; the client reads raw bytes and counts events. Lateness is the server's own: when a token was written after
the step that made it was due to end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as Pipe


def serve(streams: int, step_ms: float, pipe: Pipe) -> None:
    from understudy.engines.config import VllmConfig
    from understudy.engines.timing import Constant
    from understudy.server.loop import heap_frozen, run
    from understudy.server.server import Server
    from understudy.server.settings import ServerSettings

    engine = VllmConfig(
        block_size=16,
        num_gpu_blocks=streams * 300,
        max_num_seqs=streams,
        max_num_batched_tokens=None,
        max_model_len=4096,
        timing=Constant(prefill_ms=0.0, decode_ms=step_ms),
    )

    async def main() -> None:
        server = Server(ServerSettings(model="bench", port=0, engine=engine, max_model_len=4096))
        await server.start()
        pipe.send(server.port)
        with heap_frozen():
            while not pipe.poll():
                await asyncio.sleep(0.1)
        late = server.stage.token_lateness
        usage = resource.getrusage(resource.RUSAGE_SELF)
        steps = server.stage.driver.step_lateness
        pipe.send(
            {
                "tokens": late.count,
                "p50_ms": late.quantile(0.5) * 1e3,
                "p99_ms": late.quantile(0.99) * 1e3,
                "step_p99_ms": steps.quantile(0.99) * 1e3,
                "cpu_s": usage.ru_utime + usage.ru_stime,
            }
        )

    run(main())


def _request(tokens: int) -> bytes:
    body = json.dumps({"prompt": "load", "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


class Stream(asyncio.Protocol):
    """Sends the same request again and again, and counts the events that come back."""

    def __init__(self, tokens: int, counts: list[int], first: int) -> None:
        self._first, self._request = _request(first), _request(tokens)
        self._counts = counts
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._first)

    def data_received(self, data: bytes) -> None:
        self._counts[0] += data.count(b'"text"')
        if b"[DONE]" in data:
            self._counts[1] += 1
            assert self._transport is not None
            self._transport.write(self._request)


async def load(port: int, streams: int, tokens: int, seconds: float) -> tuple[int, int, float]:
    counts = [0, 0]
    loop = asyncio.get_running_loop()
    transports = []
    for index in range(streams):
        # First answers of every length, so that from then on ends and arrivals are spread over time.
        first = 1 + index * tokens // streams
        transport, _ = await loop.create_connection(
            lambda first=first: Stream(tokens, counts, first),  # type: ignore[misc]
            "127.0.0.1",
            port,
        )
        transports.append(transport)
    await asyncio.sleep(1.0)
    before, began = counts[0], time.monotonic()
    await asyncio.sleep(seconds)
    got, took = counts[0] - before, time.monotonic() - began
    for transport in transports:
        transport.close()
    return got, counts[1], took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens-per-second", type=float, default=10_000)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    step_ms = 1e3 * args.streams / args.tokens_per_second
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(args.streams, step_ms, theirs))
    process.start()
    port = ours.recv()
    got, ended, took = asyncio.run(load(port, args.streams, args.output_tokens, args.seconds))
    ours.send("stop")
    told = ours.recv()
    process.join()
    print(
        f"{args.streams} streams, a step every {step_ms:.1f} ms: asked for {args.tokens_per_second:,.0f} tokens/s"
    )
    print(f"delivered     {got / took:,.0f} tokens/s in {took:.1f} s; {ended} requests ended")
    print(
        f"token late    p50 {told['p50_ms']:.2f} ms, p99 {told['p99_ms']:.2f} ms over {told['tokens']:,} tokens"
    )
    print(f"step end late p99 {told['step_p99_ms']:.2f} ms")
    print(f"server CPU    {told['cpu_s'] / max(told['tokens'], 1) * 1e6:.1f} µs a token, start-up included")
    pages = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"memory        {pages / 1024:.0f} MB at most")


if __name__ == "__main__":
    main()

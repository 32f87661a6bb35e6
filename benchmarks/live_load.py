"""Load on one live worker: tokens a second and how late they are, with a client on the same machine.

    python benchmarks/live_load.py [--streams 256] [--tokens-per-second 10000] [--seconds 10]
    python benchmarks/live_load.py --beside-vllm .venv-vllm-0.33.0/bin/python [--json [FOLDER]]
    python benchmarks/live_load.py --lateness [--json [FOLDER]]

The server runs in a process of its own with constant step times, so that `streams` concurrent streams ask for the
given rate; the client reads raw bytes and counts events and tokens. Lateness is the server's own: when a token was
written after the step that made it was due to end.

With `--beside-vllm`, the interpreter of an environment that has vLLM, its own front end (`vllm_front.py`) then has the
same load from the same client. A front end that cannot keep up puts several tokens into an event; so three numbers are
compared: tokens a second, those that came in an event of their own, and processor time of the server for a token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from harness.publish import add_json_flag, publish

if TYPE_CHECKING:
    from multiprocessing.connection import Connection as Pipe


def serve(streams: int, step_ms: float, pipe: Pipe) -> None:
    from understudy.engines.timing import Constant
    from understudy.engines.vllm_config import VllmConfig
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
        late = server.runtime.token_lateness
        steps = server.runtime.driver.step_lateness
        pipe.send(
            {
                "tokens": late.count,
                "p50_ms": late.quantile(0.5) * 1e3,
                "p99_ms": late.quantile(0.99) * 1e3,
                "step_p99_ms": steps.quantile(0.99) * 1e3,
            }
        )

    run(main())


def _request(tokens: int) -> bytes:
    body = json.dumps({"prompt": "load", "max_tokens": tokens, "stream": True, "ignore_eos": True}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: b\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


class Seen:
    """What the client saw while it measured."""

    def __init__(self) -> None:
        self.events = self.spaces = self.ended = 0
        self.gaps_s: list[float] = []

    @property
    def tokens(self) -> int:
        """A token is a word with its space before it, and an event has one of its own."""
        return self.spaces - self.events - self.ended


class Stream(asyncio.Protocol):
    """Sends the same request again and again, and counts what comes back."""

    def __init__(self, tokens: int, seen: Seen, first: int) -> None:
        self._first, self._request = _request(first), _request(tokens)
        self._seen = seen
        self._transport: asyncio.Transport | None = None
        self._last_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._first)

    def data_received(self, data: bytes) -> None:
        seen = self._seen
        head = data.find(b"\r\n\r\n") if data.startswith(b"HTTP/1.1") else -1
        body = data[head + 4 :] if head >= 0 else data
        events = body.count(b'"text"')
        seen.events += events
        seen.spaces += body.count(b" ")
        now_s = time.monotonic()
        if events:
            if self._last_s:
                seen.gaps_s.append(now_s - self._last_s)
            self._last_s = now_s
        if b"[DONE]" in body:
            self._last_s = 0.0
            seen.ended += 1
            assert self._transport is not None
            self._transport.write(self._request)


class Load(NamedTuple):
    """What a server gave, in a time of its own, to the client."""

    tokens_per_s: float
    events_per_s: float
    cpu_us: float
    """Processor time of the server for a token."""
    gap_p50_ms: float
    gap_p99_ms: float
    ended: int
    took_s: float


async def load(port: int, streams: int, tokens: int, seconds: float) -> Load:
    seen = Seen()
    loop = asyncio.get_running_loop()
    transports = []
    for index in range(streams):
        # First answers of every length, so that from then on ends and arrivals are spread over time.
        first = 1 + index * tokens // streams
        transport, _ = await loop.create_connection(
            lambda first=first: Stream(tokens, seen, first),  # type: ignore[misc]
            "127.0.0.1",
            port,
        )
        transports.append(transport)
    await asyncio.sleep(1.0)
    cpu_s = await asyncio.to_thread(cpu_of, port)
    seen.gaps_s.clear()
    had, events, began = seen.tokens, seen.events, time.monotonic()
    await asyncio.sleep(seconds)
    got, events, took = seen.tokens - had, seen.events - events, time.monotonic() - began
    gaps = sorted(seen.gaps_s) or [0.0]
    cpu_s = await asyncio.to_thread(cpu_of, port) - cpu_s
    for transport in transports:
        transport.close()
    p50_ms, p99_ms = (1e3 * gaps[int(share * (len(gaps) - 1))] for share in (0.5, 0.99))
    return Load(
        tokens_per_s=got / took,
        events_per_s=events / took,
        cpu_us=1e6 * cpu_s / max(got, 1),
        gap_p50_ms=p50_ms,
        gap_p99_ms=p99_ms,
        ended=seen.ended,
        took_s=took,
    )


def cpu_of(port: int) -> float:
    """Processor seconds that a server has used so far, as it says itself."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    found = re.search(r"^process_cpu_seconds_total (\S+)$", page, re.MULTILINE)
    assert found is not None
    return float(found[1])


def ours(args: argparse.Namespace, step_ms: float) -> tuple[Load, dict[str, float]]:
    """Our server under load, and what it says of itself."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(args.streams, step_ms, there))
    process.start()
    port = here.recv()
    given = asyncio.run(load(port, args.streams, args.output_tokens, args.seconds))
    here.send("stop")
    told: dict[str, float] = here.recv()
    process.join()
    return given, told


def theirs(args: argparse.Namespace, step_ms: float) -> Load:
    """vLLM's front end under the same load."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export = (sys.executable, "-m", "understudy", "tokenizer", "export", str(folder / "tokenizer"))
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        script = Path(__file__).with_name("vllm_front.py")
        command = [args.beside_vllm, script, "--model", folder / "model", "--tokenizer", folder / "tokenizer"]
        command += ["--step-ms", str(step_ms), "--streams", str(args.streams)]
        with (folder / "errors").open("w") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit("vLLM did not start:\n" + (folder / "errors").read_text()[-2000:])
            wait_for(int(line))
            return asyncio.run(load(int(line), args.streams, args.output_tokens, args.seconds))
        finally:
            process.terminate()
            process.wait()


def wait_for(port: int, patience_s: float = 120.0) -> None:
    """Until a server says that it is well."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=patience_s)
            return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > until_s:
                raise
            time.sleep(0.5)


def show(name: str, given: Load) -> None:
    print(
        f"{name:13} {given.tokens_per_s:,.0f} tokens/s in {given.events_per_s:,.0f} events/s, {given.took_s:.1f} s; "
        f"{given.ended} requests ended"
    )
    print(
        f"{'':13} {given.cpu_us:.1f} µs of processor time a token; the client read events "
        f"{given.gap_p50_ms:.1f} ms (p50), {given.gap_p99_ms:.1f} ms (p99) apart"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens-per-second", type=float, default=10_000)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--beside-vllm", metavar="PYTHON", help="of an environment that has vLLM")
    parser.add_argument("--lateness", action="store_true", help="measure three loads, one after the other")
    add_json_flag(parser)
    args = parser.parse_args()
    if args.lateness:
        publish("live_lateness", measure_lateness(args), args.json)
        return
    step_ms = 1e3 * args.streams / args.tokens_per_second
    given, told = ours(args, step_ms)
    print(
        f"{args.streams} streams, a step every {step_ms:.1f} ms: asked for {args.tokens_per_second:,.0f} tokens/s"
    )
    show("understudy", given)
    print(
        f"token late    p50 {told['p50_ms']:.2f} ms, p99 {told['p99_ms']:.2f} ms over {told['tokens']:,} tokens"
    )
    print(f"step end late p99 {told['step_p99_ms']:.2f} ms")
    pages = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(f"memory        {pages / 1024:.0f} MB at most")
    if args.beside_vllm is None:
        return
    peer = theirs(args, step_ms)
    show("vLLM's own", peer)
    print(f"ratio         {given.events_per_s / peer.events_per_s:.2f}× events/s")
    us: dict[str, float] = {"delivered": round(given.tokens_per_s), "CPU per token": given.cpu_us}
    us["tokens per second of the peer"] = given.tokens_per_s / peer.tokens_per_s
    them = {"delivered": round(peer.tokens_per_s), "CPU per token": peer.cpu_us}
    version = vllm_version(args.beside_vllm)
    measured = {"Understudy": us, f"vLLM {version}'s front end": them}
    publish("live_load", measured, args.json, peers=[f"vLLM {version}"])


def measure_lateness(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run three loads; return how many tokens came, and how late."""
    rows: dict[str, dict[str, float]] = {}
    for streams, rate in ((256, 10_000), (256, 20_000), (16, 1000)):
        args.streams = streams
        given, told = ours(args, 1e3 * streams / rate)
        numbers = {"delivered": round(given.tokens_per_s), "p50": told["p50_ms"], "p99": told["p99_ms"]}
        rows[f"{streams} streams, {rate:,} tokens/s requested"] = numbers
    return rows


def vllm_version(python: str) -> str:
    """Return the release that an interpreter has."""
    code = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()

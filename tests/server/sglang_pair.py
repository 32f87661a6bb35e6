"""A prefill and a decode server of SGLang in processes of their own, and SGLang's router in front of them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import urllib.request
from typing import TYPE_CHECKING

from server.clients import OUTPUT_TOKENS, Target, documented
from server.sglang_clients import COUNTS, ask, free_port, wait_until_routed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REQUESTS = 12
WAYS = ("--policy random", "--policy round_robin", "--mini-lb")
"""How the router chooses servers: by a policy, or as its small load balancer in Python."""
SIDE = ("--engine", "sglang", "--page-size", "16", "--max-total-tokens", "65536", "--disaggregation-mode")


@contextlib.contextmanager
def pair() -> Iterator[tuple[Target, Target, int]]:
    """Start both servers; yield them and the bootstrap port."""
    port = free_port()
    prefill = Target("serve", *SIDE, "prefill", "--disaggregation-bootstrap-port", str(port))
    try:
        decode = Target("serve", *SIDE, "decode")
        try:
            yield prefill, decode, port
        finally:
            decode.stop()
    finally:
        prefill.stop()


@contextlib.contextmanager
def router(python: Path, way: str, prefill: Target, decode: Target, bootstrap: int) -> Iterator[int]:
    """Start SGLang's router for a pair; yield its port."""
    port = free_port()
    command = next(line for line in documented("sglang") if "--pd-disaggregation" in line)
    words = command.partition(" --policy")[0].split()
    servers = ["--prefill", f"http://127.0.0.1:{prefill.port}", str(bootstrap)]
    servers += ["--decode", f"http://127.0.0.1:{decode.port}"]
    run = [str(python), *words[1:], *way.split(), *servers, "--host", "127.0.0.1", "--port", str(port)]
    run += ["--prometheus-port", str(free_port())]
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_routed(port, "/health" if "--mini-lb" in run else "/readiness")
        yield port
    finally:
        process.terminate()
        process.wait(30)


def stream(port: int, body: dict[str, object]) -> list[str]:
    """Send a request for a stream; return the data of its events."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    text = urllib.request.urlopen(request, timeout=60).read().decode()
    return [line[6:] for line in text.splitlines() if line.startswith("data: ")]


def route_pair(python: Path, way: str) -> None:
    """Send requests through the router to a pair; both servers' counts must equal the client's."""
    with pair() as (prefill, decode, bootstrap), router(python, way, prefill, decode, bootstrap) as port:
        before = [[target.metric(name) for name in COUNTS] for target in (prefill, decode)]
        parameters = {"max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        for number in range(REQUESTS):
            text = f"{number} " * 40
            if number % 3 == 0:
                body: dict[str, object] = {"model": "my-model", "prompt": text, "max_tokens": OUTPUT_TOKENS}
                usage = ask(port, "/v1/completions", {**body, "ignore_eos": True})["usage"]
                assert isinstance(usage, dict)
                assert usage["completion_tokens"] == OUTPUT_TOKENS, usage
            elif number % 3 == 1:
                meta = ask(port, "/generate", {"text": text, "sampling_params": parameters})["meta_info"]
                assert isinstance(meta, dict)
                assert meta["completion_tokens"] == OUTPUT_TOKENS, meta
            else:
                events = stream(port, {"text": text, "sampling_params": parameters, "stream": True})
                assert events[-1] == "[DONE]", events[-3:]
                assert json.loads(events[-2])["meta_info"]["completion_tokens"] == OUTPUT_TOKENS, events[-2]
        after = [[target.metric(name) for name in COUNTS] for target in (prefill, decode)]
        counts = [
            [int(now - old) for now, old in zip(*pair_of, strict=True)]
            for pair_of in zip(after, before, strict=True)
        ]
        # A prefill server gives one token of each request, a decode server all.
        assert counts == [[REQUESTS, REQUESTS], [REQUESTS, REQUESTS * OUTPUT_TOKENS]], counts
        print(f"sglang_router {way}: {REQUESTS} requests through a prefill and a decode server", flush=True)

"""SGLang's own benchmark and router, unmodified, against live SGLang servers: `make clients-sglang`.

Each is run as docs/clients/sglang.md says. Requests and output tokens that a client counts must equal the servers'.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from server.clients import OUTPUT_TOKENS, REQUESTS, Target, documented

COUNTS = ("sglang:num_requests_total", "sglang:generation_tokens_total")
POLICIES = ("cache_aware", "round_robin")


def bench(target: Target, python: Path, command: str, folder: Path) -> None:
    """Run SGLang's benchmark; its first request warms up."""
    before = [target.metric(name) for name in COUNTS]
    out = folder / f"{len(list(folder.iterdir()))}.jsonl"
    words = command.replace("http://127.0.0.1:8000", f"http://127.0.0.1:{target.port}").split()
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    run = [str(python), *words[1:], "--output-file", str(out)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = json.loads(out.read_text().splitlines()[-1])
    assert (found["completed"], found["total_output_tokens"]) == (REQUESTS, REQUESTS * OUTPUT_TOKENS), found
    wrote = [target.metric(name) - old for name, old in zip(COUNTS, before, strict=True)]
    assert wrote == [REQUESTS + 1, (REQUESTS + 1) * OUTPUT_TOKENS], wrote
    print(
        f"bench_serving {found['backend']}: {REQUESTS} requests, {REQUESTS * OUTPUT_TOKENS} tokens",
        flush=True,
    )


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def ask(port: int, path: str, body: dict[str, object]) -> dict[str, object]:
    """Send a JSON body and return the answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"}
    )
    answer: dict[str, object] = json.loads(urllib.request.urlopen(request, timeout=60).read())
    return answer


def wait_until_routed(port: int, path: str = "/readiness") -> None:
    """Wait until the router has registered its workers."""
    for _ in range(240):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10).read()
        except OSError:  # an HTTPError is one
            time.sleep(0.5)
        else:
            return
    raise SystemExit("sglang_router found no worker")


def route(target: Target, python: Path, policy: str) -> None:
    """Send requests through SGLang's router to the workers of a fleet."""
    port = free_port()
    command = next(line for line in documented("sglang") if "--worker-urls" in line)
    words = command.partition(" --policy")[0].split()
    urls = [f"http://127.0.0.1:{worker}" for worker in target.workers]
    run = [str(python), *words[1:], "--policy", policy, "--host", "127.0.0.1", "--port", str(port)]
    run += ["--prometheus-port", str(free_port()), "--worker-urls", *urls]
    router = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until_routed(port)
        before = [[target.metric_of(worker, name) for name in COUNTS] for worker in target.workers]
        for number in range(REQUESTS):
            if number % 2:
                body: dict[str, object] = {"model": "my-model", "prompt": f"{number} " * 40}
                body |= {"max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
                usage = ask(port, "/v1/completions", body)["usage"]
                assert isinstance(usage, dict)
                assert usage["completion_tokens"] == OUTPUT_TOKENS
            else:
                parameters = {"max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
                meta = ask(port, "/generate", {"text": f"{number} " * 40, "sampling_params": parameters})
                assert isinstance(meta["meta_info"], dict)
                assert meta["meta_info"]["completion_tokens"] == OUTPUT_TOKENS
        after = [[target.metric_of(worker, name) for name in COUNTS] for worker in target.workers]
        shares = [now[0] - old[0] for now, old in zip(after, before, strict=True)]
        tokens = sum(now[1] - old[1] for now, old in zip(after, before, strict=True))
        assert (sum(shares), tokens) == (REQUESTS, REQUESTS * OUTPUT_TOKENS), (shares, tokens)
        assert policy != "round_robin" or min(shares) == REQUESTS / len(urls), shares
        print(f"sglang_router {policy}: {REQUESTS} requests over {len(urls)} servers: {shares}", flush=True)
    finally:
        router.terminate()
        router.wait(30)


def main() -> None:
    """Run all; an assertion ends the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sglang", type=Path, help="python of an environment with sglang")
    parser.add_argument("--router", type=Path, help="python of one with sglang_router")
    args = parser.parse_args()
    if args.sglang is not None:
        target = Target("serve", "--engine", "sglang")
        try:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                export = (
                    sys.executable,
                    "-m",
                    "understudy",
                    "tokenizer",
                    "export",
                    str(folder / "hf"),
                    "--hub",
                )
                subprocess.run(export, check=True, timeout=60, stdout=subprocess.DEVNULL)
                for command in documented("sglang"):
                    if "bench_serving" in command:
                        bench(target, args.sglang, command, folder)
        finally:
            target.stop()
    if args.router is not None:
        target = Target("fleet", "--engine", "sglang", "--workers", "2", "--base-port", "0")
        try:
            for policy in POLICIES:
                route(target, args.router, policy)
        finally:
            target.stop()
        from server.sglang_pair import WAYS, route_pair

        for way in WAYS:
            route_pair(args.router, way)
    print("SGLang's clients agree with the servers")


if __name__ == "__main__":
    main()

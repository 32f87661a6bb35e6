"""Real clients, unmodified, against a live server and a KV-routed fleet of 20: `make clients-ci`.

Each is run as its users run it; counts of requests and tokens must agree with the server's own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

REQUESTS, OUTPUT_TOKENS = 20, 16


def serve(verb: str, *flags: str) -> tuple[subprocess.Popen[str], int]:
    """A server, or a fleet's door, on a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy", verb, "my-model", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)$", line.rstrip()):
            return process, int(found[1])
    raise SystemExit("the server did not start")


def metric(port: int, name: str) -> float:
    """The sum of a metric's samples."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name + "{"))


def run_openai(clients: Path, port: int) -> None:
    """A chat, streamed."""
    script = (
        "from openai import OpenAI\n"
        f"client = OpenAI(base_url='http://127.0.0.1:{port}/v1', api_key='x', max_retries=0)\n"
        "stream = client.chat.completions.create(model='my-model', stream=True, max_tokens=9,\n"
        "    messages=[{'role': 'user', 'content': 'hello'}], stream_options={'include_usage': True})\n"
        "chunks = list(stream)\n"
        "assert chunks[-1].usage.completion_tokens == 9, chunks[-1]\n"
    )
    subprocess.run([clients / "python", "-c", script], check=True, timeout=120)


def run_aiperf(clients: Path, port: int, folder: Path, name: str, flags: str, requests: int) -> None:
    """One run of aiperf; its report must have every request and token."""
    home = folder / "hf"
    if not home.exists():
        subprocess.run(
            [sys.executable, "-m", "understudy", "tokenizer", "export", str(home), "--hub"],
            check=True,
            timeout=60,
        )
    command = (
        f"{clients / 'aiperf'} profile --model my-model --url http://127.0.0.1:{port} --streaming {flags} "
        f"--tokenizer understudy/tok --extra-inputs ignore_eos:true --ui simple --artifact-dir {folder / name}"
    )
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command.split(), check=True, timeout=900, env=environment)
    (found,) = (folder / name).rglob("profile_export_aiperf.json")
    told = json.loads(found.read_text())
    count = told["request_count"]["avg"]
    tokens = round(told["output_sequence_length"]["avg"] * count)
    ttft_ms = told["time_to_first_token"]["avg"]
    print(f"aiperf, {name}: {count:.0f} requests, {tokens} tokens, TTFT {ttft_ms:.1f} ms")
    assert count == requests
    assert tokens == requests * OUTPUT_TOKENS


def write_trace(path: Path) -> None:
    """Twenty questions about four contexts, as Mooncake writes them."""
    rows = (
        {
            "timestamp": 100 * n,
            "input_length": 1024,
            "output_length": OUTPUT_TOKENS,
            "hash_ids": [n % 4, 100 + n],
        }
        for n in range(REQUESTS)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


CHAT = f"--endpoint-type chat --concurrency 4 --request-count {REQUESTS} --isl 128 --osl {OUTPUT_TOKENS}"
TRACE = "--endpoint-type completions --custom-dataset-type mooncake_trace --fixed-schedule --use-server-token-count"


def check_server(clients: Path, folder: Path) -> None:
    """One worker: a chat by openai, load by aiperf; counts are the server's own."""
    process, port = serve("serve", "--max-num-seqs", "64")
    try:
        run_openai(clients, port)
        assert metric(port, "vllm:generation_tokens_total") == 9
        if (clients / "aiperf").exists():
            run_aiperf(clients, port, folder, "concurrency", CHAT, REQUESTS)
            assert metric(port, "vllm:generation_tokens_total") >= 9 + REQUESTS * OUTPUT_TOKENS
    finally:
        process.terminate()
        assert process.wait(20) == 0


def check_fleet(clients: Path, folder: Path) -> None:
    """Twenty workers behind a KV-aware door: the same, and a trace on its own schedule."""
    process, port = serve("fleet", "--workers", "20", "--base-port", "0", "--routing", "kv")
    try:
        run_openai(clients, port)
        if (clients / "aiperf").exists():
            write_trace(folder / "trace.jsonl")
            flags = f"{TRACE} --input-file {folder / 'trace.jsonl'}"
            run_aiperf(clients, port, folder, "mooncake", flags, REQUESTS)
        assert metric(port, "understudy:routed_requests_total") >= 1
    finally:
        process.terminate()
        assert process.wait(20) == 0


def main() -> None:
    """Run them; the exit code tells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=Path, required=True, help="bin of an environment with the clients")
    clients = parser.parse_args().clients.absolute()
    with tempfile.TemporaryDirectory() as folder:
        check_server(clients, Path(folder))
        check_fleet(clients, Path(folder))
    print("clients agree with the server")


if __name__ == "__main__":
    main()

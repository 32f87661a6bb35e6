"""Real clients, unmodified, against a live server: `make clients-ci`.

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


def serve(*flags: str) -> tuple[subprocess.Popen[str], int]:
    """A server on a free port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "understudy", "serve", "my-model", "--port", "0", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
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


def run_aiperf(clients: Path, port: int, folder: Path) -> None:
    """Concurrency over chat; its report must have every request and token."""
    home = folder / "hf"
    subprocess.run(
        [sys.executable, "-m", "understudy", "tokenizer", "export", str(home), "--hub"],
        check=True,
        timeout=60,
    )
    command = (
        f"{clients / 'aiperf'} profile --model my-model --url http://127.0.0.1:{port} --endpoint-type chat --streaming "
        f"--concurrency 4 --request-count {REQUESTS} --isl 128 --osl {OUTPUT_TOKENS} --tokenizer understudy/tok "
        f"--extra-inputs ignore_eos:true --ui simple --artifact-dir {folder / 'aiperf'}"
    )
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command.split(), check=True, timeout=900, env=environment)
    (found,) = (folder / "aiperf").rglob("profile_export_aiperf.json")
    told = json.loads(found.read_text())
    requests = told["request_count"]["avg"]
    tokens = told["output_sequence_length"]["avg"] * requests
    print(
        f"aiperf: {requests:.0f} requests, {tokens:.0f} tokens, TTFT {told['time_to_first_token']['avg']:.1f} ms"
    )
    assert requests == REQUESTS
    assert tokens == REQUESTS * OUTPUT_TOKENS


def main() -> None:
    """Run them; the exit code tells."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=Path, required=True, help="bin of an environment with the clients")
    clients = parser.parse_args().clients.absolute()
    process, port = serve("--max-num-seqs", "64")
    try:
        run_openai(clients, port)
        assert metric(port, "vllm:generation_tokens_total") == 9
        if (clients / "aiperf").exists():
            with tempfile.TemporaryDirectory() as folder:
                run_aiperf(clients, port, Path(folder))
            assert metric(port, "vllm:generation_tokens_total") >= 9 + REQUESTS * OUTPUT_TOKENS
        print("clients agree with the server")
    finally:
        process.terminate()
        assert process.wait(20) == 0


if __name__ == "__main__":
    main()

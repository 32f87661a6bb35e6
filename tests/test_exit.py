"""Processes end without an object left: nanobind reports instances that are alive when the interpreter has ended."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRACE = str(ROOT / "examples" / "demo_trace.jsonl")

SCRIPTS = {
    "import": "import understudy, understudy._core",
    "replay": f"""
import understudy
from understudy.router.kv import KvRouting
runs = [understudy.replay({TRACE!r}, workers=2, routing=routing) for routing in ("round_robin", KvRouting())]
""",
    "a router that raises": f"""
import understudy
class Mine(understudy.Router):
    def choose(self, request, view):
        self.seen = request, view
        raise ValueError
understudy.replay({TRACE!r}, workers=2, routing=Mine())
""",
    "objects of a module": """
from understudy.engines.vllm_config import VllmConfig
from understudy.router.kv import KvRouting
from understudy.server.engines import SimulatedCore
from understudy.tokens import TokenBlocks
router = KvRouting().build(seed=1)
core = SimulatedCore(VllmConfig(block_size=16), events=True)
engine, blocks = core.engine, TokenBlocks(range(64), block_size=16)
identities = blocks.identities
""",
    "a policy that refers to its manager": """
from understudy.kv import BlockManager, EvictionPolicy
class Mine(EvictionPolicy):
    def on_freed(self, blocks, lineage_hashes): pass
    def on_taken(self, blocks): pass
    def select(self, count): return []
policy = Mine()
policy.manager = BlockManager(8, policy=policy)
""",
    "an exception": """
from understudy.engines.vllm_config import VllmConfig
from understudy.server.engines import SimulatedCore
def fail():
    core = SimulatedCore(VllmConfig(block_size=16))
    core.vllm.submit("x", -1, 5, None)
fail()
""",
    "a publisher that is not closed": """
from understudy.events.publisher import Publisher
publisher = Publisher("tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0", bind=True)
""",
}
COMMANDS = {
    "replay": ["replay", TRACE, "--workers", "2"],
    "replay with KV routing and a host tier": [
        "replay",
        TRACE,
        "--workers",
        "2",
        "--routing",
        "kv",
        "--g2",
        "100",
        "--kv-bytes-per-token",
        "1000",
    ],
    "replay online": [
        "replay",
        TRACE,
        "--online",
        "--clock-speed",
        "100",
        "--workers",
        "2",
        "--routing",
        "kv",
    ],
    "a refused replay": ["replay", TRACE, "--gpu", "H1000", "--model", "Llama-3.1-8B"],
    "help": ["fleet", "--help"],
}
SERVERS = {
    "serve": ["serve", "m"],
    "fleet": ["fleet", "m", "--workers", "2", "--base-port", "0", "--routing", "kv"],
    "fleet over processes": ["fleet", "m", "--workers", "2", "--processes", "2", "--base-port", "0"],
}


CODES = {"a router that raises": 1, "an exception": 1, "a refused replay": 2}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_leaves_no_object(name: str) -> None:
    assert_nothing_leaked(name, [sys.executable, "-c", SCRIPTS[name]])


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_leaves_no_object(tmp_path: Path, name: str) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text('{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n' * 3)
    words = [str(short) if word == "SHORT" else word for word in COMMANDS[name]]
    assert_nothing_leaked(name, [sys.executable, "-m", "understudy", *words])


def assert_nothing_leaked(name: str, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "nanobind" not in done.stderr
    assert done.returncode == CODES.get(name, 0), done.stderr


@pytest.mark.parametrize("name", SERVERS)
def test_a_server_that_is_stopped_in_mid_stream_leaves_no_object(name: str) -> None:
    command = [
        sys.executable,
        "-m",
        "understudy",
        *SERVERS[name],
        "--port",
        "0",
        "--inter-token-latency",
        "50",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port = next(
            found[1]
            for line in process.stderr
            if (found := re.search(r" on http://127\.0\.0\.1:(\d+)", line))
        )
        begun = threading.Event()
        streams = [threading.Thread(target=read_stream, args=(port, begun)) for _ in range(3)]
        for stream in streams:
            stream.start()
        assert begun.wait(60)
        process.send_signal(signal.SIGTERM)
        told = process.stderr.read()
        assert process.wait(60) == 0
        for stream in streams:
            stream.join()
    assert "nanobind" not in told


def read_stream(port: str, begun: threading.Event) -> None:
    body = json.dumps({"prompt": "a b c " * 40, "max_tokens": 2000, "stream": True, "ignore_eos": True})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body.encode(), {"content-type": "application/json"}
    )
    with suppress(OSError, ValueError), urllib.request.urlopen(request, timeout=60) as answer:
        answer.readline()
        begun.set()
        answer.read()

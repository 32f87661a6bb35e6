"""`understudy serve` as a process: it says where it listens, drains or aborts on SIGTERM, and exits with 0."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from typing import Any

import pytest


def start(*flags: str) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "understudy",
            "serve",
            "m",
            "--port",
            "0",
            "--inter-token-latency",
            "5",
            *flags,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
            return process, int(found[1])
    raise AssertionError(f"the server ended with {process.wait()}")


def ask(port: int, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=30)


@pytest.mark.parametrize("drain", [True, False])
def test_sigterm_drains_when_told_and_exits_with_zero(drain: bool) -> None:
    process, port = start(*(["--shutdown-timeout", "20"] if drain else []))
    with ask(port, {"prompt": "x", "max_tokens": 100, "stream": True}) as stream:
        stream.readline()
        process.send_signal(signal.SIGTERM)
        rest = b""
        with suppress(OSError, http.client.IncompleteRead):
            rest = stream.read()
    assert (b"[DONE]" in rest) == drain
    assert process.wait(20) == 0
    assert process.stderr is not None
    process.stderr.close()


def test_a_port_that_is_taken_is_an_error_without_a_traceback() -> None:
    process, port = start()
    other = subprocess.run(
        [sys.executable, "-m", "understudy", "serve", "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert other.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in other.stderr
    assert "Traceback" not in other.stderr
    process.terminate()
    began = time.monotonic()
    assert process.wait(20) == 0
    assert time.monotonic() - began < 20
    assert process.stderr is not None
    process.stderr.close()

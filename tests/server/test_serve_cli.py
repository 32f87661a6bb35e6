"""`understudy serve` as a process: it says where it listens, drains or aborts on SIGTERM, and exits with 0."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path


def start(
    *flags: str, where: str = r"http://127\.0\.0\.1:(\d+)", model: str = "m"
) -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "understudy",
            "serve",
            model,
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
        if found := re.search(where, line):
            return process, int(found[1] or 0)
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
        rest = stream.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert (b"shutting down" in rest) != drain
    assert process.wait(20) == 0
    assert process.stderr is not None
    process.stderr.close()


def refused(*flags: str) -> str:
    """What a server says that cannot start."""
    other = subprocess.run(
        [sys.executable, "-m", "understudy", "serve", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert other.returncode == 2
    assert "Traceback" not in other.stderr
    return other.stderr


def test_a_port_that_is_taken_is_an_error_without_a_traceback() -> None:
    process, port = start()
    told = refused("--port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}" in told
    process.terminate()
    began = time.monotonic()
    assert process.wait(20) == 0
    assert time.monotonic() - began < 20
    assert process.stderr is not None
    process.stderr.close()


def test_a_second_signal_ends_the_drain() -> None:
    process, port = start("--shutdown-timeout", "600", "--inter-token-latency", "200")
    with ask(port, {"prompt": "x", "max_tokens": 3000, "stream": True, "ignore_eos": True}) as stream:
        stream.readline()
        process.send_signal(signal.SIGTERM)
        while True:  # it listens no longer: it has heard
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionError:  # refused, or reset where it was about to be heard
                break
        process.send_signal(signal.SIGINT)
        assert b"shutting down" in stream.read()
    assert process.wait(60) == 0
    assert process.stderr is not None
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_an_address_of_ipv6_is_told_as_a_url() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs IPv6")
    process, port = start("--host", "::1", where=r"http://\[::1\]:(\d+)$")
    with urllib.request.urlopen(f"http://[::1]:{port}/health", timeout=30) as answer:
        assert answer.status == 200
    process.terminate()
    assert process.wait(60) == 0
    assert process.stderr is not None
    process.stderr.close()


def test_a_server_listens_at_a_path_instead_of_a_port(tmp_path: Path) -> None:
    path = tmp_path / "s"
    where = rf"on unix:{path}()$"
    process, _ = start("--uds", str(path), where=where)
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(30)
        asked.connect(str(path))
        asked.sendall(b"GET /version HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        assert asked.recv(65536).startswith(b"HTTP/1.1 200")
    told = refused("--uds", str(path))
    assert f"cannot listen on {path}: " in told
    process.kill()  # it leaves its socket, and the next takes its place
    process.wait(60)
    assert path.exists()
    again, _ = start("--uds", str(path), where=where)
    again.terminate()
    assert again.wait(60) == 0
    assert not path.exists()
    for one in (process, again):
        assert one.stderr is not None
        one.stderr.close()


def test_a_fleet_names_the_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags in (["--base-port", "0", "--port", str(port)], ["--base-port", str(port), "--port", "0"]):
            if port > 65533:
                continue
            other = subprocess.run(
                [sys.executable, "-m", "understudy", "fleet", "m", "--workers", "2", *flags],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert other.returncode == 2
            assert f"127.0.0.1:{port}" in other.stderr
            assert "Traceback" not in other.stderr

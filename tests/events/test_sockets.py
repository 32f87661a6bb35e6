"""Peers that speak no ZMQ, and a system that has no files left: neither ends the process."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from understudy.events.publisher import Publisher

if TYPE_CHECKING:
    from collections.abc import Callable

_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f"
_NOISE = random.Random(1).randbytes(4096)

PEERS: dict[str, Callable[[socket.socket], object]] = {
    "says nothing": lambda peer: peer.settimeout(None),
    "closes at once": lambda peer: peer.close(),
    "noise": lambda peer: peer.sendall(_NOISE),
    "HTTP": lambda peer: peer.sendall(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n"),
    "noise behind a greeting": lambda peer: peer.sendall(_GREETING + b"\3\0NULL" + b"\0" * 48 + _NOISE),
    "noise of the first release": lambda peer: peer.sendall(b"\1\0" + _NOISE),
}


@pytest.mark.parametrize("peer", PEERS)
def test_a_publisher_that_is_connected_to_another_kind_of_server_goes_on(peer: str) -> None:
    heard = threading.Event()
    peers: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                peers.append(listening.accept()[0])
                PEERS[peer](peers[-1])
                heard.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with Publisher(f"tcp://127.0.0.1:{listening.getsockname()[1]}") as publisher:
            assert heard.wait(10)
            for _ in range(20):
                publisher.publish([])
                time.sleep(0.001)
            assert publisher.next_sequence == 20
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in peers:
            one.close()


_MANY = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
from understudy.errors import ConfigError
from understudy.events.publisher import Publisher
from understudy.events.subscriber import Subscriber
made = []
try:
    while len(made) < 100:
        made.append({make})
except ConfigError as error:
    print(len(made), error)
for one in made:
    one.close()
"""


@pytest.mark.parametrize(
    "make", ["Publisher('tcp://*:0')", "Publisher('tcp://127.0.0.1:9')", "Subscriber('tcp://127.0.0.1:9')"]
)
def test_too_few_open_files_are_an_error_and_not_the_end_of_the_process(make: str) -> None:
    pytest.importorskip("resource")
    code = _MANY.replace("{make}", make)
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    made, _, why = run.stdout.partition(" ")
    assert int(made) > 2
    assert "raise the limit of open files (ulimit -n)" in why

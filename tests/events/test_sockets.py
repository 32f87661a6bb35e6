"""Peers that speak no ZMQ, and a system that has no files left: neither ends the process."""

from __future__ import annotations

import contextlib
import os
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
    from pathlib import Path

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
    made, _, why = _python(_MANY.replace("{make}", make)).partition(" ")
    assert int(made) > 2
    assert "raise the limit of open files (ulimit -n)" in why


_THREADS = """
import os
from understudy.events.publisher import Publisher
from understudy.events.subscriber import Subscriber

def threads(): return len(os.listdir("/proc/self/task"))

before = threads()
made = [{make} for _ in range(10)]
amid = threads() - before
for one in made[1:]:
    one.close()
left = threads() - before
made[0].close()
made[0].close()
print(amid, left, threads() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("make", ["Publisher('tcp://*:0')", "Subscriber('tcp://127.0.0.1:9')"])
def test_all_of_a_process_share_the_threads_of_one_context_and_the_last_takes_them_along(make: str) -> None:
    assert _python(_THREADS.replace("{make}", make)) == "2 2 0"


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "tcp://*:0", "ipc://{path}", "inproc://here"])
def test_an_address_can_be_bound_again_once_its_publisher_is_closed(endpoint: str, tmp_path: Path) -> None:
    with Publisher("tcp://*:0"):  # else the context would go, and take all addresses with it
        address = endpoint.replace("{path}", str(tmp_path / "socket"))
        for _ in range(50):
            with Publisher(address, replay="tcp://*:0", bind=True) as publisher:
                address = publisher.endpoint


def test_a_context_has_room_for_more_sockets_than_libzmq_gives_it_at_first() -> None:
    resource = pytest.importorskip("resource")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("too few open files are allowed here")
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 2048))
from understudy.events.publisher import Publisher
made = [Publisher(f"inproc://{number}") for number in range(1100)]
for one in made:
    one.close()
print(len(made))
"""
    assert _python(code) == "1100"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_a_fork_has_a_context_of_its_own_and_leaves_its_parents_alone() -> None:
    code = """
import os
from understudy.events.publisher import Publisher
from understudy.events.subscriber import Subscriber

def hear(publisher):
    with Subscriber(publisher.endpoint) as subscriber:
        while subscriber.poll(10) is None:
            publisher.publish([])

with Publisher("tcp://127.0.0.1:0", replay="tcp://127.0.0.1:0", bind=True) as parents:
    hear(parents)
    child = os.fork()
    if child == 0:
        parents.close()
        with Publisher("tcp://127.0.0.1:0", bind=True) as own:
            hear(own)
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    hear(parents)
print("heard")
"""
    assert _python(code) == "heard"


def _python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()

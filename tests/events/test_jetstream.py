"""The same events through NATS JetStream; a server of our own, where there is one."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any

import pytest

from events.following import PlainView, removed, stored
from understudy.errors import ConfigError
from understudy.events.jetstream import JetStreamPublisher, JetStreamSubscriber, build_subject

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVER = shutil.which("nats-server", path="/usr/sbin:/usr/local/bin:/usr/bin:/bin")
nats = pytest.importorskip("nats", reason="the extra `nats` is not installed")
needs_server = pytest.mark.skipif(SERVER is None, reason="nats-server is not installed")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert SERVER is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder: Path = tmp_path_factory.mktemp("nats")
    command = [SERVER, "-js", "-a", "127.0.0.1", "-p", str(port), "-sd", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield f"nats://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


class View(PlainView):
    """What a subscriber of JetStream told."""

    def __init__(self, follower: JetStreamSubscriber) -> None:
        self.follower = follower
        self.blocks = set()
        self.clears = 0

    async def hear(self, messages: int) -> None:
        deadline = time.monotonic() + 20
        while self.follower.counters.messages < messages:
            assert time.monotonic() < deadline, self.follower.counters
            update = await self.follower.poll(200)
            if update is not None:
                update.columns.check()
                self.take(update.columns)


@needs_server
def test_what_is_published_arrives_also_for_one_who_comes_late(server: str) -> None:
    async def play() -> None:
        source = await JetStreamPublisher.open(server, "early", dialect="sglang-0.5.20")
        for i in range(20):
            await source.publish([stored(100 + i)])
        view = View(await JetStreamSubscriber.open(server, "early"))
        await source.publish([removed(100)])
        await view.hear(21)
        assert view.hashes == set(range(101, 120))
        assert (view.follower.state, view.clears) == ("live", 0)
        await source.close()
        # The next life of the worker: what it held is void.
        again = await JetStreamPublisher.open(server, "early")
        await again.publish([stored(7)])
        await view.hear(22)
        assert view.hashes == {7}
        assert (view.follower.counters.restarts, view.follower.state, view.clears) == (1, "live", 1)
        await again.close()
        await view.follower.close()

    asyncio.run(play())


@needs_server
def test_what_the_server_has_dropped_leaves_a_partial_view(server: str) -> None:
    async def play() -> None:
        source = await JetStreamPublisher.open(server, "long")
        for i in range(10_050):
            await source._client.publish(
                source._subject, b"\x92\x01\x90", headers={"Kv-Sequence": str(i), "Kv-Epoch": "a"}
            )
        last = {"Kv-Sequence": "10050", "Kv-Epoch": "a"}
        await source._stream.publish(
            source._subject, b"\x92\x01\x90", headers=last
        )  # the server has them all
        view = View(await JetStreamSubscriber.open(server, "long"))
        await view.hear(10_000)
        assert view.follower.state == "partial"
        assert view.follower.counters.partial_views == 1
        await source._client.publish(source._subject, b"\xc1", headers={})
        await view.hear(10_001)
        assert (view.follower.counters.bad_frames, view.follower.counters.malformed_batches) == (1, 1)
        await source.close()
        await view.follower.close()

    asyncio.run(play())


def test_what_cannot_be_is_refused() -> None:
    for worker in ("", "a.b", "a b", "*", ">"):
        with pytest.raises(ConfigError, match="cannot be part of a subject"):
            build_subject(worker)
    with pytest.raises(ConfigError, match="cannot connect to NATS"):
        asyncio.run(_open_nowhere())


async def _open_nowhere() -> Any:
    return await JetStreamPublisher.open("nats://127.0.0.1:1", "w")

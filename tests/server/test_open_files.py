"""A front that has no open files left answers 503, keeps its engines, and serves again when files are free."""

from __future__ import annotations

import asyncio
import errno
import json
import re
import resource
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from understudy.proxy.engine_connection import OutOfFiles
from understudy.proxy.upstream import Upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = 100
BODY = json.dumps({"prompt": "x", "max_tokens": 12, "ignore_eos": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"


@pytest.fixture
def front() -> Iterator[int]:
    """The port of a fleet over two processes, which may have few files open."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "understudy", "fleet", "stub", "--workers", "4", "--processes", "2"),
            *("--base-port", "0", "--port", "0", "--inter-token-latency", "100"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
    )
    assert process.stderr is not None
    port = 0
    for line in process.stderr:
        if found := re.search(r"front end and page on http://127\.0\.0\.1:(\d+)", line):
            port = int(found[1])
            break
    try:
        assert port, "the fleet did not start"
        yield port
    finally:
        process.terminate()
        rest = process.stderr.read()
        assert process.wait(60) == 0
        process.stderr.close()
    assert "Traceback" not in rest
    assert "is down" not in rest


async def status_of(port: int) -> int:
    """The status of a completion; 0: the connection ended without one."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY))
        answer = await reader.read()
        writer.close()
    except OSError:
        return 0
    return int(answer.split(b" ", 2)[1]) if answer else 0


def test_a_door_without_free_files_answers_503_and_recovers(front: int) -> None:
    async def go() -> None:
        told = Counter(await asyncio.gather(*(status_of(front) for _ in range(3 * FILES))))
        assert set(told) == {200, 503}
        assert await status_of(front) == 200

    asyncio.run(go())


def test_no_free_file_says_nothing_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        def full(*_: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", full)
        with pytest.raises(OutOfFiles, match="no file is free for a connection"):
            await Upstream("http://127.0.0.1:9").ask("GET", "/health")

    asyncio.run(go())

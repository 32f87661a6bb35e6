"""Encrypted connections: failed handshakes harm no other client, and a drain waits for encrypted bytes."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from typing import TYPE_CHECKING

import pytest

from server.client import parse_reply, serving
from server.test_slow_clients import HEAD, settled

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    make = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -keyout {key} -out {cert}"
    subprocess.run([*make.split(), "-subj", "/CN=localhost"], check=True, capture_output=True)
    return {"ssl_certfile": cert, "ssl_keyfile": key}


def trust(files: dict[str, str]) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files["ssl_certfile"])
    context.check_hostname = False
    return context


def test_a_drain_waits_until_an_encrypted_answer_has_left(files: dict[str, str]) -> None:
    async def main() -> None:
        async with serving(clock_speed=1000.0, **files) as (_, server):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            reader, writer = await asyncio.open_connection(sock=sock, ssl=trust(files), server_hostname="t")
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            body = b'{"prompt":"x","max_tokens":2000,"n":400,"return_token_ids":true}'
            writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert await settled(server) > 1_000_000
            stopped = asyncio.create_task(server.stop(600.0))
            for _ in range(20):
                await asyncio.sleep(0.005)
            assert not stopped.done()
            writer.transport.resume_reading()  # type: ignore[attr-defined]
            told = await reader.readuntil(b"\r\n\r\n")
            length = int(told.split(b"content-length: ")[1].split(b"\r\n")[0])
            assert len(await reader.readexactly(length)) == length
            await asyncio.wait_for(stopped, 20)
            writer.close()

    asyncio.run(main())


def test_failed_and_unfinished_handshakes_harm_no_other_client(files: dict[str, str]) -> None:
    async def main() -> None:
        async with serving(**files) as (client, server):
            silent = [await asyncio.open_connection("127.0.0.1", client.port) for _ in range(5)]
            for data in (b"GET / HTTP/1.1\r\nhost: t\r\n\r\n", b"\x16\x03\x01", b""):
                _, writer = await asyncio.open_connection("127.0.0.1", client.port)
                writer.write(data)
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", client.port, ssl=trust(files))
            writer.write(b"GET /version HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
            assert parse_reply(await asyncio.wait_for(reader.read(), 10)).status == 200
            writer.close()
            await asyncio.wait_for(server.stop(0), 10)
            assert not server.runtime.outbox.handshakes
            for _, silent_writer in silent:
                silent_writer.close()

    asyncio.run(main())

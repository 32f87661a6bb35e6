"""Accepts connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.http.connection import Connection

if TYPE_CHECKING:
    import ssl

    from understudy.http.connection import Handler
    from understudy.http.outbox import Outbox


BACKLOG = 1024
"""Connections that may wait for accept while a step is processed; clients retry further ones after a second."""


async def listen(
    handler: Handler,
    outbox: Outbox,
    host: str | None,
    port: int,
    tls: ssl.SSLContext | None = None,
    *,
    uds: str | None = None,
) -> asyncio.Server:
    """Accept connections, with TLS if `tls`; port 0 chooses a free one. `uds`: a Unix socket instead. OSError."""
    sock = _bound(host, port) if uds is None else _bound_at(Path(uds))
    try:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        make = loop.create_server if uds is None else loop.create_unix_server

        def accept() -> asyncio.Protocol:
            connection = Connection(handler, outbox)
            return connection if tls is None else _TlsStart(connection, outbox, tls)

        return await make(accept, sock=sock, backlog=BACKLOG)
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise


class _TlsStart(asyncio.Protocol):
    """Starts TLS below a connection. With `create_server(ssl=…)` the unsent encrypted bytes could not be counted."""

    def __init__(self, connection: Connection, outbox: Outbox, tls: ssl.SSLContext) -> None:
        self._connection = connection
        self._outbox = outbox
        self._tls = tls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        assert isinstance(transport, asyncio.Transport)
        task = asyncio.get_running_loop().create_task(self._start(transport))
        self._outbox.handshakes.add(task)
        task.add_done_callback(self._outbox.handshakes.discard)

    async def _start(self, below: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport = await loop.start_tls(below, self._connection, self._tls, server_side=True)
        except OSError:  # the handshake failed, and asyncio has closed the connection
            return
        if transport is not None and not transport.is_closing():
            self._connection.connection_made(transport, below)


def address_of(host: str, port: int) -> str:
    """Format host and port for a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bound(host: str | None, port: int) -> socket.socket:
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host or "", port))
    except BaseException:
        sock.close()
        raise
    return sock


def _bound_at(path: Path) -> socket.socket:
    """Bind a Unix socket; replace the stale one of a killed server."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            try:
                sock.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            sock.close()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(path))
    except BaseException:
        sock.close()
        raise
    return sock

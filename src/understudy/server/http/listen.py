"""Accepts connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

from understudy.server.http.connection import Connection

if TYPE_CHECKING:
    import ssl

    from understudy.server.http.outbox import Outbox
    from understudy.server.http.request import Handler


async def listen(
    handler: Handler, outbox: Outbox, host: str | None, port: int, tls: ssl.SSLContext | None = None
) -> asyncio.Server:
    """Accept connections, encrypted ones with `tls`; port 0 picks a free one."""

    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host or "", port))
        sock.listen(1024)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        return await loop.create_server(lambda: Connection(handler, outbox), sock=sock, ssl=tls)
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise

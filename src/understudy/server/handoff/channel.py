"""The side channel of hand-offs: notifications and heartbeats from decode servers to a prefill server.

A connection carries lines of JSON. The decode server begins with `{"hello": …}`, the prefill server answers with its
engine id and block size (the handshake), and lines `{"done": [ids]}` or `{"heartbeat": [ids]}` follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("understudy.server")

MAX_LINE = 1 << 22
HANDSHAKE_S = 5.0
"""Longest time for a handshake, seconds."""


class Notice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message of a decode server."""

    done: list[str] = []
    """Ids of requests whose blocks were read, or are not needed."""
    heartbeat: list[str] = []
    """Ids of requests whose blocks are still needed."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First message of a decode server."""

    hello: int


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer of a prefill server to the first message."""

    engine_id: str
    block_size: int


class SideChannel:
    """The listening side, of a prefill server."""

    def __init__(self, answer: Answer, on_notice: Callable[[Notice], None]) -> None:
        self._answer = answer
        self._on_notice = on_notice
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port. OSError when it is taken."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_LINE)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            hello = msgspec.json.decode(await asyncio.wait_for(reader.readline(), HANDSHAKE_S), type=Hello)
            if hello.hello != 1:
                return
            writer.write(msgspec.json.encode(self._answer) + b"\n")
            while line := await reader.readline():
                self._on_notice(msgspec.json.decode(line, type=Notice))
        except (msgspec.MsgspecError, ValueError, OSError, TimeoutError) as error:
            log.warning("side channel: a peer is disconnected: %s", error)
        finally:
            self._open.discard(writer)
            writer.close()

    def drop(self) -> None:
        """Disconnect the peers, because the engine has died."""
        for writer in tuple(self._open):
            writer.close()

    def close(self) -> None:
        """Stop listening and disconnect the peers."""
        if self._server is not None:
            self._server.close()
        self.drop()


class PeerChannel:
    """The connecting side, of a decode server. Call its methods in the event loop."""

    def __init__(self, host: str, port: int, block_size: int, engine_id: str) -> None:
        self.host = host
        self.port = port
        self._block_size = block_size
        self._engine_id = engine_id
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_closed(self) -> bool:
        """True when there is neither a connection nor a handshake."""
        return self._task is None

    def connect(self, on_open: Callable[[], None], on_closed: Callable[[str], None]) -> None:
        """Begin the handshake. Call `on_open` when it is done, and `on_closed` with the reason of its end."""
        if self._task is not None:
            return

        async def run() -> None:
            why = "the peer has closed the connection"
            try:
                reader = await asyncio.wait_for(self._shake_hands(), HANDSHAKE_S)
                on_open()
                while await reader.read(1 << 16):
                    pass  # a prefill server sends nothing more
            except (msgspec.MsgspecError, ValueError, OSError, TimeoutError) as error:
                why = str(error) or type(error).__name__
            finally:
                self._task = None
                if self._writer is not None:
                    self._writer.close()
                    self._writer = None
            on_closed(why)

        self._task = asyncio.get_running_loop().create_task(run())

    async def _shake_hands(self) -> asyncio.StreamReader:
        reader, self._writer = await asyncio.open_connection(self.host, self.port, limit=MAX_LINE)
        self._writer.write(msgspec.json.encode(Hello(1)) + b"\n")
        answer = msgspec.json.decode(await reader.readline(), type=Answer)
        if answer.engine_id != self._engine_id:
            raise ValueError(
                f"the peer is engine {answer.engine_id!r}, and the request names {self._engine_id!r}"
            )
        if answer.block_size != self._block_size:
            raise ValueError(
                f"the peer has blocks of {answer.block_size} tokens, this server {self._block_size}"
            )
        return reader

    def send(self, notice: Notice) -> None:
        """Send a message; without a connection it is lost."""
        if self._writer is not None:
            self._writer.write(msgspec.json.encode(notice) + b"\n")

    async def close(self) -> None:
        """Disconnect."""
        task = self._task
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

"""HTTP/1.1 client for engines, with reused connections and streamed answers."""

from __future__ import annotations

import asyncio
import errno
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from understudy.errors import ConfigError
from understudy.http import address_of
from understudy.http.heads import BODYLESS
from understudy.http.parsing import MalformedMessage
from understudy.proxy.engine_connection import (
    NO_LIMITS,
    EngineConnection,
    EngineStalled,
    OutOfFiles,
    TimeLimits,
    Unreachable,
    UpstreamError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from understudy.proxy.answers import AnswerHead

__all__ = ["NO_LIMITS", "Answer", "OutOfFiles", "TimeLimits", "Unreachable", "Upstream", "UpstreamError"]

_MAX_IDLE = 64


class Answer:
    """An answer whose body is not read yet."""

    def __init__(
        self, head: AnswerHead, upstream: Upstream, connection: EngineConnection, *, bodyless: bool
    ) -> None:
        self.head = head
        self.status = head.status
        self.headers = head.headers
        self.bodyless = bodyless or head.status in BODYLESS
        """True for an answer without a body, even if it has a length."""
        self.has_length = self.bodyless or (head.length is not None and head.length >= 0)
        self._upstream = upstream
        self._connection = connection

    async def chunks(self) -> AsyncIterator[bytes]:
        """Read the body as it arrives. UpstreamError when it is cut off, or stalls."""
        connection = self._connection
        try:
            while not self.bodyless and (part := await connection.read_body()):
                yield part
        except EngineStalled as error:
            self.close()
            raise EngineStalled(f"{self._upstream.url} {error}") from error
        except (UpstreamError, MalformedMessage) as error:
            self.close()
            raise UpstreamError(
                f"{self._upstream.url} broke off in the middle of its answer: {error}"
            ) from error
        except BaseException:
            self.close()
            raise
        # Some engines send a body even where HTTP forbids one.
        if self.head.keep_alive and not self.bodyless:
            self._upstream.keep(connection)
        else:
            self.close()

    async def body(self) -> bytes:
        """Read the whole body."""
        return b"".join([part async for part in self.chunks()])

    def close(self) -> None:
        """Close its connection; the engine stops generating."""
        self._connection.close()


class Upstream:
    """One engine's address, and the connections to it that can be used again.

    `key` is sent with our own requests (`get`, `post`).
    """

    def __init__(self, url: str, limits: TimeLimits = NO_LIMITS, key: str | None = None) -> None:
        self._own_headers = {"content-type": "application/json"}
        if key is not None:
            self._own_headers["authorization"] = f"Bearer {key}"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(
                f"workers: {url!r} is not the URL of an engine: {error}; write http://HOST:PORT"
            ) from None
        is_bare_word = "://" not in url and port is None
        if (
            parts.scheme != "http"
            or not parts.hostname
            or parts.path not in ("", "/", "/v1", "/v1/")
            or is_bare_word
        ):
            raise ConfigError(f"workers: {url!r} is not the URL of an engine; write http://HOST:PORT")
        self.host = parts.hostname
        self.port = 80 if port is None else port
        self.address = address_of(self.host, self.port)
        self.url = f"http://{self.address}"
        self._limits = limits
        self._idle: list[EngineConnection] = []
        self._closed = False

    async def ask(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a request once, and wait for the head of its answer. UpstreamError when there is none.

        Unreachable: no connection could be made, and the request may go to another engine. No other failure proves
        that the engine has not read it, so nothing else may be sent again.
        """
        data = request_bytes(method, target, body, {"host": self.address, **(headers or {})})
        connection = self._reusable() or await self._connect()
        try:
            connection.send(data)
            head = await connection.read_head()
        except EngineStalled as error:
            connection.close()
            raise EngineStalled(f"{self.url} {error}") from error
        except UpstreamError as error:
            connection.close()
            raise UpstreamError(f"{self.url} does not answer: {error}") from error
        except MalformedMessage as error:
            connection.close()
            raise UpstreamError(f"{self.url} does not speak HTTP: {error}") from error
        except BaseException:
            connection.close()
            raise
        return Answer(head, self, connection, bodyless=method == "HEAD")

    def _reusable(self) -> EngineConnection | None:
        while self._idle:
            connection = self._idle[-1]  # taking it removes it
            if connection.take():
                return connection
        return None

    async def _connect(self) -> EngineConnection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: EngineConnection(self._limits), self.host, self.port
            )
        except (OSError, ValueError) as error:  # ValueError: an invalid host name
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise OutOfFiles(
                    f"no file is free for a connection to {self.url}; raise the limit of open files (ulimit -n)"
                ) from error
            why = str(error) or type(error).__name__
            raise Unreachable(f"{self.url} cannot be reached: {why}") from error
        return connection

    async def get(self, target: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
        """Return status and body of a GET. UpstreamError when there is no answer in time."""
        return await self._whole("GET", target, b"", timeout_s)

    async def post(self, target: str, body: bytes, timeout_s: float = 5.0) -> tuple[int, bytes]:
        """Return status and body of a POST of JSON. UpstreamError when there is no answer in time."""
        return await self._whole("POST", target, body, timeout_s)

    async def _whole(self, method: str, target: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.ask(method, target, body, self._own_headers)
                return answer.status, await answer.body()
        except TimeoutError:
            raise UpstreamError(f"{self.url}{target} does not answer within {timeout_s} s") from None

    def keep(self, connection: EngineConnection) -> None:
        """Pool a connection whose answer has ended, or close it if it cannot be used again."""
        if self._closed or len(self._idle) >= _MAX_IDLE:
            connection.close()
        elif connection.become_idle(self._idle.remove):
            self._idle.append(connection)

    def close(self) -> None:
        """Close idle connections, and others when their answer ends."""
        self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that no request uses."""
        for connection in tuple(self._idle):
            connection.close()


def request_bytes(method: str, target: str, body: bytes, headers: dict[str, str]) -> bytes:
    """Build a request; its length is that of the body."""
    lines = [f"{method} {target} HTTP/1.1", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body

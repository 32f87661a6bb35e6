"""Asking an engine over HTTP/1.1: connections that are used again, answers that are passed on as they come."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from understudy.errors import ConfigError
from understudy.server.http import address_of
from understudy.server.http.heads import BODYLESS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MAX_HEAD_BYTES = 256 * 1024
_READ_BYTES = 64 * 1024
_MAX_IDLE = 64


class UpstreamError(Exception):
    """The engine cannot be reached, says what is no HTTP, or nothing."""


class Unreachable(UpstreamError):
    """Nothing was sent: there is nobody."""


class Answer:
    """An answer whose body is still to come."""

    def __init__(
        self, status: int, headers: dict[str, str], upstream: Upstream, pair: _Pair, *, bodyless: bool
    ) -> None:
        self.status = status
        self.headers = headers
        self.bodyless = bodyless or status in BODYLESS
        """Its head is all of it; a length says what there would be."""
        self._upstream = upstream
        self._reader, self._writer = pair

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. UpstreamError when it breaks off."""
        try:
            if self.bodyless:
                pass
            elif self.headers.get("transfer-encoding", "").lower() == "chunked":
                async for part in self._chunked():
                    yield part
            elif "content-length" in self.headers:
                left = int(self.headers["content-length"])
                while left:
                    part = await self._reader.read(min(left, _READ_BYTES))
                    if not part:
                        raise UpstreamError("the answer broke off")
                    left -= len(part)
                    yield part
            else:
                while part := await self._reader.read(_READ_BYTES):
                    yield part
                self.close()
                return
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            self.close()
            raise UpstreamError(f"the answer broke off: {error}") from error
        except BaseException:
            self.close()
            raise
        if self.headers.get("connection", "").lower() == "close" or self.status in BODYLESS:
            self.close()  # not everybody agrees that such an answer has ended
        else:
            self._upstream.keep((self._reader, self._writer))

    async def _chunked(self) -> AsyncIterator[bytes]:
        while True:
            line = await self._reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            if not size:
                break
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        while await self._reader.readuntil(b"\r\n") != b"\r\n":
            pass  # headers behind the body, which nobody reads

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([part async for part in self.chunks()])

    def close(self) -> None:
        """Nobody wants the rest."""
        self._writer.close()


_Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Upstream:
    """One engine's address."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"a worker is an address like http://host:8000, got {url!r}: {error}") from None
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/", "/v1", "/v1/"):
            raise ConfigError(f"a worker is an address like http://host:8000, got {url!r}")
        self.host = parts.hostname
        self.port = 80 if port is None else port
        self.address = address_of(self.host, self.port)
        self.url = f"http://{self.address}"
        self._idle: list[_Pair] = []

    async def ask(
        self, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        """Send a request, and wait for the head of its answer. UpstreamError when there is none.

        Unreachable says that the engine cannot have seen it: it may go to another one.
        """
        lines = [
            f"{method} {target} HTTP/1.1",
            f"host: {self.address}",
            f"content-length: {len(body)}",
        ]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        data = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + body
        kept = self._kept()
        used = kept is not None
        while True:
            try:
                pair = kept or await self._connect()
            except Unreachable as error:
                if used:  # it was sent, and may be what the engine has gone of
                    raise UpstreamError(f"{self.url} does not answer any more") from error
                raise
            try:
                pair[1].write(data)
                status, named = await _read_head(pair[0])
            except (OSError, asyncio.IncompleteReadError) as error:
                pair[1].close()
                if kept is not None:  # it was closed meanwhile; another one might have been too
                    kept = None
                    continue
                raise UpstreamError(
                    f"{self.url} does not answer: {str(error) or type(error).__name__}"
                ) from error
            except (ValueError, asyncio.LimitOverrunError) as error:
                pair[1].close()
                raise UpstreamError(f"{self.url} does not speak HTTP: {error}") from error
            except asyncio.CancelledError:
                pair[1].close()
                raise
            return Answer(status, named, self, pair, bodyless=method == "HEAD")

    def _kept(self) -> _Pair | None:
        """A connection that was used before, and that the engine has not closed since."""
        while self._idle:
            pair = self._idle.pop()
            if not pair[0].at_eof():
                return pair
            pair[1].close()
        return None

    async def _connect(self) -> _Pair:
        try:
            return await asyncio.open_connection(self.host, self.port)
        except (OSError, ValueError) as error:  # of names that no address has, some are no names
            why = str(error) or type(error).__name__
            raise Unreachable(f"{self.url} cannot be reached: {why}") from error

    async def get(self, target: str, timeout_s: float = 5.0) -> tuple[int, bytes]:
        """Status and body of a GET. UpstreamError when there is no answer in time."""
        return await self._whole("GET", target, b"", timeout_s)

    async def post(self, target: str, body: bytes, timeout_s: float = 5.0) -> tuple[int, bytes]:
        """The same of a POST of JSON."""
        return await self._whole("POST", target, body, timeout_s)

    async def _whole(self, method: str, target: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.ask(method, target, body, {"content-type": "application/json"})
                return answer.status, await answer.body()
        except TimeoutError:
            raise UpstreamError(f"{self.url}{target} does not answer within {timeout_s} s") from None

    def keep(self, pair: _Pair) -> None:
        """A connection that can be used again."""
        if len(self._idle) < _MAX_IDLE and not pair[0].at_eof():
            self._idle.append(pair)
        else:
            pair[1].close()

    def close(self) -> None:
        """Let go of idle connections."""
        while self._idle:
            with suppress(OSError, RuntimeError):
                self._idle.pop()[1].close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        lines = head[:-4].split("\r\n")
        parts = lines[0].split(" ", 2)
        if len(head) > MAX_HEAD_BYTES or len(parts) < 2 or not parts[0].startswith("HTTP/1."):
            raise ValueError(f"no answer begins with {lines[0][:40]!r}")
        status = int(parts[1])
        if status >= 200:
            break
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return status, headers

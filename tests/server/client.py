"""A small HTTP client for tests, and a server to talk to."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.server.server import Server
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

QUICK = VllmConfig(
    block_size=16, num_gpu_blocks=1024, max_model_len=4096, timing=Constant(prefill_ms=1.0, decode_ms=1.0)
)


@dataclass
class Reply:
    """An answer, whole."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of a stream's events, the last of which is "[DONE]"."""
        lines = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line if line == "[DONE]" else msgspec.json.decode(line) for line in lines]


class Client:
    """Asks one server; a connection for every question."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def ask(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> Reply:
        data = b"" if body is None else body if isinstance(body, bytes) else msgspec.json.encode(body)
        named = {
            "host": "localhost",
            "connection": "close",
            "content-type": "application/json",
            **(headers or {}),
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        return await self.raw(
            f"{method} {path} HTTP/1.1\r\n{head}content-length: {len(data)}\r\n\r\n".encode() + data
        )

    async def raw(self, data: bytes) -> Reply:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(data)
            answer = await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()
        return parse_reply(answer)

    async def get(self, path: str) -> Reply:
        return await self.ask("GET", path)

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        return await self.ask(
            "POST", path, body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )


def parse_reply(data: bytes) -> Reply:
    """The last answer in the bytes of a connection that was closed."""
    while data.startswith(b"HTTP/1.1 100"):
        data = data.partition(b"\r\n\r\n")[2]
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    if headers.get("transfer-encoding") == "chunked":
        parts = []
        while body:
            size, _, rest = body.partition(b"\r\n")
            if not size or not int(size, 16):
                break
            parts.append(rest[: int(size, 16)])
            body = rest[int(size, 16) + 2 :]
        body = b"".join(parts)
    return Reply(int(lines[0].split(" ")[1]), headers, body)


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[Client, Server]]:
    """A server on a free port with quick steps."""
    given = {"engine": QUICK, "max_model_len": 4096, "model": "stub", "port": 0, **settings}
    server = Server(ServerSettings(**given))
    await server.start()
    try:
        yield Client(server.port), server
    finally:
        await server.stop(0)
        server.runtime.driver.stop()

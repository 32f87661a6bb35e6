"""The bootstrap server of a prefill server, on which decode servers find it, and a client of it.

Its routes and answers are those of SGLang 0.5.23. A server here is one process with one rank, which is registered from
the start.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from understudy.http import address_of, listen
from understudy.http.bodies import MAX_BODY_DEPTH

if TYPE_CHECKING:
    from understudy.http import Connection, Outbox, Request

_PARAMETERS = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
_ROOM_S = 120.0
"""How long the rank of a room is remembered."""
_MAX_ROOMS = 1 << 16
_MAX_ANSWER = 1 << 16
TIMEOUT_S = 5.0
"""Longest time for an answer of a bootstrap server, seconds."""


class PrefillInfo(msgspec.Struct, kw_only=True):
    """What a bootstrap server says of its prefill server."""

    page_size: int | None = None
    kv_cache_dtype: str | None = None
    attn_tp_size: int = 1
    attn_cp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    follow_bootstrap_room: bool = True
    enable_dsa_cache_layer_split: bool = False
    decode_allocation_policy: str = "early"
    enable_kv_cache_sharding: bool = False
    prefill_http_port: int | None = None
    target_tp_rank: int | None = None
    target_tp_ranks: list[int] | None = None
    target_cp_ranks: list[int] | None = None
    target_pp_ranks: list[int] | None = None
    required_dst_info_num: int | None = None
    required_prefill_response_num: int | None = None


class RankInfo(msgspec.Struct):
    """Where a rank of a prefill server is reached."""

    rank_ip: str
    rank_port: int


class BootstrapServer:
    """Answers decode servers. Runs in the event loop of its prefill server."""

    max_body_bytes = 1 << 20
    max_body_depth = MAX_BODY_DEPTH

    def __init__(self, info: PrefillInfo) -> None:
        self._info = info
        self._rank: RankInfo | None = None
        self._rooms: dict[int, tuple[int, float]] = {}
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, host: str, port: int, outbox: Outbox, rank: RankInfo, http_port: int) -> None:
        """Listen. OSError when the port is taken."""
        self._rank, self._info.prefill_http_port = rank, http_port
        self._server = await listen(self, outbox, host, port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()

    def malformed(self, status: int, why: str) -> bytes:  # noqa: ARG002
        """Build the body of the answer to a malformed request."""
        return why.encode()

    def handle(self, request: Request, connection: Connection) -> None:
        """Answer one request."""
        status, body = self._answer(request)
        if isinstance(body, str):
            connection.respond(status, body.encode(), "text/plain; charset=utf-8")
        else:
            connection.respond(status, msgspec.json.encode(body))

    def _answer(self, request: Request) -> tuple[int, Any]:
        path = request.path
        if path == "/health":
            return (200, "OK") if request.method in ("GET", "HEAD") else (405, "Method not allowed")
        if path == "/route":
            if request.method == "GET":
                return self._route({name: values[0] for name, values in parse_qs(request.query).items()})
            if request.method == "PUT":
                return (
                    400,
                    "This prefill server is one process, which is registered; there is nothing to add.",
                )
            return 405, "Method not allowed"
        if path in ("/register_dp_rank", "/query_dp_ranks"):
            return self._ranks(request, path) if request.method == "POST" else (405, "Method not allowed")
        return 404, "404: Not Found"

    def _route(self, query: dict[str, str]) -> tuple[int, Any]:
        given = [query.get(name) for name in _PARAMETERS]
        if not all(given):
            return 400, "Missing inputs for bootstrap server."
        try:
            ranks = [int(value or "") for value in given]
        except ValueError:
            return 400, "Ranks must be whole numbers."
        if self._rank is None:
            return 503, "Prefill server not fully registered yet (0 workers registered)."
        if ranks == [-1] * 4:
            return 200, self._info
        if ranks != [0] * 4:
            dp, cp, tp, pp = ranks
            where = f"dp_rank={dp} cp_rank={cp} tp_rank={tp} pp_rank={pp}"
            return 404, f"Bootstrap info not found for {where}"
        return 200, self._rank

    def _ranks(self, request: Request, path: str) -> tuple[int, Any]:
        value = request.decode().value
        try:
            if path == "/register_dp_rank":
                if len(self._rooms) >= _MAX_ROOMS:
                    self._forget_old()
                self._rooms[int(value["bootstrap_room"])] = (int(value["dp_rank"]), time.monotonic())
                return 200, "OK"
            rooms = [int(room) for room in value["bootstrap_rooms"]]
        except (TypeError, KeyError, ValueError, OverflowError):
            return 400, "The body must name rooms and ranks as whole numbers."
        return 200, {str(room): self._rooms[room][0] for room in rooms if room in self._rooms}

    def _forget_old(self) -> None:
        oldest = time.monotonic() - _ROOM_S
        self._rooms = {room: one for room, one in self._rooms.items() if one[1] > oldest}
        while len(self._rooms) >= _MAX_ROOMS:
            del self._rooms[next(iter(self._rooms))]


class BootstrapClient:
    """Asks the bootstrap server of a prefill server."""

    def __init__(self, host: str, port: int) -> None:
        self.address = address_of(host, port)
        self._host = host
        self._port = port

    async def fetch_info(self) -> PrefillInfo:
        """Ask for the sizes of a prefill server. OSError or ValueError without a proper answer."""
        return msgspec.json.decode(await self._get(_route_target(-1)), type=PrefillInfo)

    async def fetch_rank(self) -> RankInfo:
        """Ask where its rank is reached. OSError or ValueError without a proper answer."""
        return msgspec.json.decode(await self._get(_route_target(0)), type=RankInfo)

    async def is_healthy(self) -> bool:
        """Return True if it answers."""
        try:
            await self._get("/health")
        except (OSError, ValueError, asyncio.IncompleteReadError):
            return False
        return True

    async def _get(self, target: str) -> bytes:
        """Send one GET request and return the body of its answer. OSError, or ValueError for another status."""
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(self._host, self._port, limit=_MAX_ANSWER)
            try:
                host = address_of(self._host, self._port)
                writer.write(f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                status, *lines = head.split("\r\n")
                headers = {
                    name.strip().lower(): text for name, _, text in (one.partition(":") for one in lines)
                }
                length = headers.get("content-length", "").strip()
                if not length.isdecimal() or int(length) > _MAX_ANSWER:
                    raise ValueError(f"{self.address} answers without a length")
                body = await reader.readexactly(int(length))
            finally:
                writer.close()
        if status.split(" ")[1:2] != ["200"]:
            text = body.decode("utf-8", "replace")[:200]
            raise ValueError(f"{self.address} answers {status.partition(' ')[2]}: {text}")
        return body


def _route_target(rank: int) -> str:
    return "/route?" + "&".join(f"{name}={rank}" for name in _PARAMETERS)


def find_local_address(host: str) -> str:
    """Return the address under which other machines reach a server that listens on `host`."""
    if host not in ("", "0.0.0.0", "::"):
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            found: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return found

"""DNS SRV records of a name, asked over UDP, or over TCP if the answer does not fit (RFC 1035, RFC 2782)."""

from __future__ import annotations

import asyncio
import secrets
import struct
from pathlib import Path
from typing import NamedTuple

_SRV, _INTERNET = 33, 1
_RECURSION = 0x0100
_TRUNCATED = 0x0200
_NO_SUCH_NAME = 3
_MOST_JUMPS = 64
_RESOLV_CONF = Path("/etc/resolv.conf")


class DnsError(Exception):
    """A name server that does not answer, or whose answer cannot be read."""


class Target(NamedTuple):
    """A host and a port that a service has."""

    host: str
    port: int


class _Datagram(asyncio.DatagramProtocol):
    def __init__(self, answer: asyncio.Future[bytes], number: int) -> None:
        self._answer, self._number = answer, number

    def datagram_received(self, data: bytes, _: tuple[str, int]) -> None:
        if len(data) >= 12 and int.from_bytes(data[:2], "big") == self._number and not self._answer.done():
            self._answer.set_result(data)

    def error_received(self, error: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)


async def query_srv(name: str, server: tuple[str, int] | None = None, timeout_s: float = 2.0) -> list[Target]:
    """Return the targets of a name, those of the lowest priority number; empty if the name does not exist.

    `server` is the address of the name server (default: the first of /etc/resolv.conf). DnsError without an answer.
    """
    host, port = server or (read_name_server(), 53)
    number = secrets.randbelow(1 << 16)
    question = encode_question(name, number)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await _ask_udp(question, number, host, port)
            if int.from_bytes(answer[2:4], "big") & _TRUNCATED:
                answer = await _ask_tcp(question, host, port)
    except (TimeoutError, OSError, asyncio.IncompleteReadError) as error:
        raise DnsError(f"{host} does not answer: {str(error) or type(error).__name__}") from error
    try:
        return decode_answer(answer, number)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise DnsError(f"{host}: its answer cannot be read: {error}") from error


def read_name_server(path: Path = _RESOLV_CONF) -> str:
    """Return the first name server of the system. DnsError without one."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise DnsError(f"{path} cannot be read: {error}") from error
    for words in map(str.split, lines):
        if len(words) > 1 and words[0] == "nameserver":
            return words[1]
    raise DnsError(f"{path} names no name server")


def encode_question(name: str, number: int) -> bytes:
    """Return a query for the SRV records of a name. DnsError for a name that DNS cannot have."""
    labels = name.rstrip(".").encode("ascii", "replace").split(b".")
    if not all(0 < len(label) < 64 for label in labels) or sum(map(len, labels)) + len(labels) > 254:
        raise DnsError(f"{name!r} is not a name of DNS")
    head = struct.pack(">6H", number, _RECURSION, 1, 0, 0, 0)
    coded = b"".join(bytes([len(label)]) + label for label in labels) + b"\0"
    return head + coded + struct.pack(">2H", _SRV, _INTERNET)


def decode_answer(data: bytes, number: int) -> list[Target]:
    """Return the targets of the lowest priority number. DnsError for an error of the server."""
    found, flags, questions, answers = struct.unpack(">4H", data[:8])
    if found != number:
        raise DnsError("the answer is of another question")
    code = flags & 15
    if code == _NO_SUCH_NAME:
        return []
    if code:
        raise DnsError(f"the name server reports error {code}")
    at = 12
    for _ in range(questions):
        at = _read_name(data, at)[1] + 4
    targets: list[tuple[int, Target]] = []
    for _ in range(answers):
        _, at = _read_name(data, at)
        kind, _, _, length = struct.unpack(">2HIH", data[at : at + 10])
        at += 10
        if kind == _SRV:
            priority, _, port = struct.unpack(">3H", data[at : at + 6])
            host = _read_name(data, at + 6)[0]
            if host:  # the root: no such service
                targets.append((priority, Target(host, port)))
        at += length
    least = min((priority for priority, _ in targets), default=0)
    return sorted(target for priority, target in targets if priority == least)


def _read_name(data: bytes, at: int) -> tuple[str, int]:
    """Return a name, with jumps to earlier ones, and the place behind it. DnsError for a name without end."""
    labels: list[str] = []
    end: int | None = None
    for _ in range(_MOST_JUMPS):
        length = data[at]
        if length >= 0xC0:
            end = at + 2 if end is None else end
            at = int.from_bytes(data[at : at + 2], "big") & 0x3FFF
        elif not length:
            return ".".join(labels), at + 1 if end is None else end
        else:
            labels.append(data[at + 1 : at + 1 + length].decode("ascii"))
            at += 1 + length
    raise DnsError("a name in the answer has no end")


async def _ask_udp(question: bytes, number: int, host: str, port: int) -> bytes:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bytes] = loop.create_future()
    transport, _ = await loop.create_datagram_endpoint(
        lambda: _Datagram(answer, number), remote_addr=(host, port)
    )
    try:
        transport.sendto(question)
        return await answer
    finally:
        transport.close()


async def _ask_tcp(question: bytes, host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(len(question).to_bytes(2, "big") + question)
        length = int.from_bytes(await reader.readexactly(2), "big")
        return await reader.readexactly(length)
    finally:
        writer.close()

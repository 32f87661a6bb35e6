"""A router's engines are those that DNS or Kubernetes lists, whatever comes, goes or fails."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from understudy.errors import ConfigError
from understudy.proxy.dns_srv import (
    DnsError,
    Target,
    decode_answer,
    encode_question,
    query_srv,
    read_name_server,
)
from understudy.proxy.endpoint_slices import ApiServer, SlicesError, list_urls, read_slices
from understudy.proxy.found_workers import FoundWorkers, SrvName, read_name_service

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from understudy.proxy.address import WorkerAddress

NAME = "_http._tcp.workers.default.svc.cluster.local"


def coded(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def answer(
    question: bytes, records: list[tuple[int, int, str]], *, code: int = 0, truncated: bool = False
) -> bytes:
    """Return an answer with (priority, port, host) records, whose owner names point at the question."""
    flags = 0x8180 | code | (0x0200 if truncated else 0)
    data = question[:2] + struct.pack(">5H", flags, 1, 0 if truncated else len(records), 0, 0) + question[12:]
    if truncated:
        return data
    for priority, port, host in records:
        content = struct.pack(">3H", priority, 10, port) + coded(host)
        data += b"\xc0\x0c" + struct.pack(">2HIH", 33, 1, 5, len(content)) + content
    return data


@asynccontextmanager
async def name_server(
    records: list[tuple[int, int, str]], *, code: int = 0, over_tcp: bool = False
) -> AsyncIterator[tuple[str, int]]:
    """Answer over UDP; with `over_tcp`, UDP answers are truncated and TCP has the whole."""
    loop = asyncio.get_running_loop()

    class Server(asyncio.DatagramProtocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def datagram_received(self, data: bytes, peer: Any) -> None:
            self.transport.sendto(b"\0\0junk", peer)
            self.transport.sendto(answer(data, records, code=code, truncated=over_tcp), peer)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = int.from_bytes(await reader.readexactly(2), "big")
        data = answer(await reader.readexactly(length), records, code=code)
        writer.write(len(data).to_bytes(2, "big") + data)
        writer.close()

    tcp = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = tcp.sockets[0].getsockname()[1]
    udp, _ = await loop.create_datagram_endpoint(Server, local_addr=("127.0.0.1", port))
    try:
        yield "127.0.0.1", port
    finally:
        udp.close()
        tcp.close()


RECORDS = [(10, 8000, "b.workers"), (10, 8000, "a.workers"), (20, 9000, "spare.workers")]
LOWEST = [Target("a.workers", 8000), Target("b.workers", 8000)]


@pytest.mark.parametrize("over_tcp", [False, True])
def test_targets_of_the_lowest_priority_are_read_over_udp_or_tcp(over_tcp: bool) -> None:
    async def ask() -> list[Target]:
        async with name_server(RECORDS, over_tcp=over_tcp) as server:
            return await query_srv(NAME, server)

    assert asyncio.run(ask()) == LOWEST


def test_a_name_that_does_not_exist_has_no_targets_and_a_failure_is_an_error() -> None:
    async def ask(code: int) -> list[Target]:
        async with name_server([], code=code) as server:
            return await query_srv(NAME, server)

    assert asyncio.run(ask(3)) == []
    with pytest.raises(DnsError, match="reports error 2"):
        asyncio.run(ask(2))
    with pytest.raises(DnsError, match="does not answer"):
        asyncio.run(query_srv(NAME, ("127.0.0.1", 1), timeout_s=0.2))


def test_no_answer_makes_the_reader_loop_or_fail_with_another_error() -> None:
    good = answer(encode_question(NAME, 7), RECORDS)
    assert decode_answer(good, 7) == LOWEST
    for cut in range(8, len(good)):
        with pytest.raises((DnsError, IndexError, struct.error)):
            decode_answer(good[:cut], 7)
    looping = good[:12] + b"\xc0\x0c" + good[14:]
    with pytest.raises((DnsError, IndexError, struct.error)):
        decode_answer(looping, 7)
    with pytest.raises(DnsError, match="another question"):
        decode_answer(good, 8)
    with pytest.raises(DnsError, match="is not a name"):
        encode_question("a..b", 1)


def test_the_system_names_its_server(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("search default.svc\nnameserver 10.0.0.10\nnameserver 10.0.0.11\n")
    assert read_name_server(path) == "10.0.0.10"
    path.write_text("")
    with pytest.raises(DnsError, match="names no name server"):
        read_name_server(path)


def a_slice(*endpoints: tuple[str, bool | None], port: int = 8000) -> dict[str, Any]:
    return {
        "ports": [{"name": "kv-events", "port": 5557}, {"name": "http", "port": port}],
        "endpoints": [
            {"addresses": [address], "conditions": {} if ready is None else {"ready": ready}}
            for address, ready in endpoints
        ],
    }


def test_ready_endpoints_of_all_slices_are_listed_with_the_named_port() -> None:
    assert list_urls(a_slice(("10.1.0.4", True), ("10.1.0.5", False), ("10.1.0.6", None)), "http") == [
        "http://10.1.0.4:8000",
        "http://10.1.0.6:8000",
    ]
    assert list_urls(a_slice(("fd00::1", True)), "8000") == ["http://[fd00::1]:8000"]
    assert list_urls(a_slice(("10.1.0.4", True)), "grpc") == []
    assert list_urls({"ports": None, "endpoints": None}, None) == []


@contextmanager
def api_server(content: Any, status: int = 200) -> Iterator[tuple[int, list[tuple[str, str]]]]:
    asked: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["authorization"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port, asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_slices_are_asked_for_with_the_accounts_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    with api_server({"items": [a_slice(("10.1.0.4", True)), a_slice(("10.1.0.9", True))]}) as (port, asked):
        server = ApiServer(host="127.0.0.1", port=port, token=token, authority=None)
        found = asyncio.run(read_slices(server, "default", "workers", "http"))
    assert found == {"http://10.1.0.4:8000", "http://10.1.0.9:8000"}
    path, key = asked[0]
    assert path == (
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dworkers"
    )
    assert key == "Bearer secret"
    for status, content, message in (
        (403, {}, "answers 403; the account needs get and list of endpointslices"),
        (200, ["no"], "is no list of EndpointSlices"),
    ):
        with api_server(content, status) as (port, _):
            server = ApiServer(host="127.0.0.1", port=port, token=None, authority=None)
            with pytest.raises(SlicesError, match=message):
                asyncio.run(read_slices(server, "default", "workers", None))


class Listed:
    """A name service whose answers are given."""

    def __init__(self, *answers: set[str] | DnsError) -> None:
        self.answers = list(answers)

    async def find(self) -> set[str]:
        found = self.answers.pop(0)
        if isinstance(found, DnsError):
            raise found
        return found


class Known:
    """What a router's list of engines is asked to do."""

    def __init__(self) -> None:
        self.urls: set[str] = set()

    def expect(self, address: WorkerAddress, why: str) -> None:
        assert why
        self.urls.add(address.url)

    def remove(self, url: str) -> None:
        if url not in self.urls:
            raise ConfigError("gone")
        self.urls.discard(url)


def test_engines_come_and_go_with_their_entries_and_stay_while_the_service_fails() -> None:
    async def play() -> list[set[str]]:
        known: Any = Known()
        known.urls.add("http://by-hand")
        service = Listed({"http://a", "http://b"}, DnsError("away"), {"http://b", "http://c"}, set())
        found, seen = FoundWorkers(known, [service]), []
        for _ in range(4):
            await found.look()
            seen.append(set(known.urls))
            known.urls.discard("http://c")  # unregistered by hand: its end is no error
        return seen

    hand = "http://by-hand"
    assert asyncio.run(play()) == [
        {hand, "http://a", "http://b"},
        {hand, "http://a", "http://b"},
        {hand, "http://b", "http://c"},
        {hand},
    ]


def test_forms_of_the_flag_are_read_or_named() -> None:
    assert read_name_service("srv:workers.local") == SrvName("workers.local")
    for wrong in ("workers.local", "srv:", "endpointslices:workers"):
        with pytest.raises(ConfigError, match="write srv:NAME"):
            read_name_service(wrong)
    with pytest.raises(ConfigError, match="not a pod with a service account"):
        read_name_service("endpointslices:default/workers:http")

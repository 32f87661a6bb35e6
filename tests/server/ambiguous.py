"""Requests that two readers could understand differently, with the requests that ours must see in each."""

from __future__ import annotations

from typing import NamedTuple

SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nhost: t\r\n\r\n"
LAST = b"GET /v1/last HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n"


class Case(NamedTuple):
    """Bytes, and what they contain; nothing: they are refused."""

    data: bytes
    seen: tuple[tuple[str, str, bytes], ...] = ()


def post(fields: bytes, rest: bytes = b"", line: bytes = b"POST /v1/a HTTP/1.1", host: bytes = b"t") -> bytes:
    return line + b"\r\nhost: " + host + b"\r\n" + fields + b"\r\n" + rest


def chunked(chunks: bytes, fields: bytes = b"") -> bytes:
    return post(b"transfer-encoding: chunked\r\n" + fields, chunks)


def refused(*all_data: bytes) -> list[Case]:
    return [Case(data) for data in all_data]


def accepted(data: bytes, body: bytes = b"", path: str = "/v1/a", method: str = "POST") -> Case:
    """One request, and the last one behind it."""
    return Case(data + LAST, ((method, path, body), ("GET", "/v1/last", b"")))


ABC = b"3\r\nabc\r\n0\r\n\r\n"
NUMBERS = (
    *(
        b"-3",
        b"+3",
        b"3x",
        b"",
        b"0x3",
        b"3_0",
        b"\xb2",
        b"3, 3",
        b"3,3",
        b"3 3",
        b"3.0",
        b"3e0",
        b'"3"',
        b"3;",
    ),
    *(b"9" * 20, b"\xef\xbc\x93", b"chunked", b"3\x00", b"3\x0b"),
)
ENCODINGS = (
    *(
        b"gzip",
        b"xchunked",
        b"chunkedx",
        b"chunked, chunked",
        b"gzip, chunked",
        b"chunked, gzip",
        b"identity",
        b"",
    ),
    *(b'"chunked"', b"chunked;q=1", b"chunked\x0b", b"\x0bchunked", b"chunked,", b",chunked", b"chun ked"),
)
FIELDS = (  # beside a content-length
    *(b"Transfer-Encoding : chunked", b"Transfer-Encoding\t: chunked", b" Transfer-Encoding: chunked"),
    *(
        b"\tTransfer-Encoding: chunked",
        b"X: y\r\n Transfer-Encoding: chunked",
        b"X: y\nTransfer-Encoding: chunked",
    ),
    *(
        b"X: y\rTransfer-Encoding: chunked",
        b"Transfer-Encoding\x00: chunked",
        b"Transfer-Encoding\n: chunked",
    ),
    *(
        b"Transfer-Encoding chunked",
        b": chunked",
        b"Transfer Encoding: chunked",
        b"Transfer\xffEncoding: chunked",
    ),
    *(b"TRANSFER-ENCODING: CHUNKED", b"transfer-encoding:chunked", b"Transfer-Encoding:\tchunked"),
    *(
        b"Content-Length : 30",
        b"content-length: 3",
        b"Content-Length: 30",
        b"CONTENT-LENGTH:0",
        b"X: \x00",
        b"X: \x7f",
    ),
)
CHUNKS = (
    *(
        b"0x3\r\nabc\r\n0\r\n\r\n",
        b"+3\r\nabc\r\n0\r\n\r\n",
        b"-3\r\nabc\r\n0\r\n\r\n",
        b" 3\r\nabc\r\n0\r\n\r\n",
    ),
    *(b"3 \r\nabc\r\n0\r\n\r\n", b"3\t\r\nabc\r\n0\r\n\r\n", b"3 ;x\r\nabc\r\n0\r\n\r\n", b"3\nabc\n0\n\n"),
    *(b"3\rabc\r\n0\r\n\r\n", b"3\r\nabc0\r\n\r\n", b"3\r\nabc\n0\r\n\r\n", b"3\r\nabcd\r\n0\r\n\r\n"),
    *(b"3;x\ny\r\nabc\r\n0\r\n\r\n", b"3;x\ry\r\nabc\r\n0\r\n\r\n", b"3;\x00\r\nabc\r\n0\r\n\r\n", b"\r\n"),
    *(
        b";x\r\nabc\r\n0\r\n\r\n",
        b"g\r\nabc\r\n0\r\n\r\n",
        b"f" * 17 + b"\r\nabc",
        b"3_0\r\nabc\r\n0\r\n\r\n",
    ),
    *(
        b"0\r\nx y: z\r\n\r\n",
        b"0\r\n" + SMUGGLED,
        b"0\r\nx: y\n\r\n",
        b"0\r\n x: y\r\n\r\n",
        b"0\r\nx: \x00\r\n\r\n",
    ),
    *(b"0\r\ncontent-length: 33\r\n\r\n", b"0\r\ntransfer-encoding: gzip\r\n\r\n", b"0\n\n", b"0\r\n\rX"),
)
LINES = (
    *(
        b"POST /v1/a HTTP/1.1 ",
        b"POST /v1/a  HTTP/1.1x",
        b"POST /v1/a\tHTTP/1.1",
        b" POST /v1/a HTTP/1.1",
        b"POST\t/a HTTP/1.1",
    ),
    *(
        b"POST /v1/a b HTTP/1.1",
        b"POST /v1/a\x00 HTTP/1.1",
        b"POST /v1/a\x7f HTTP/1.1",
        b"POST /\xff HTTP/1.1",
    ),
    *(
        b"POST /v1/a\rb HTTP/1.1",
        b"POST /v1/a\nx: y HTTP/1.1",
        b"POST /v1/a HTTP/1.2",
        b"POST /v1/a HTTP/2.0",
        b"POST /v1/a HTTP/0.9",
    ),
    *(
        b"POST /v1/a",
        b"POST /v1/a http/1.1",
        b"POST /v1/a HTTP/1.",
        b"POST /v1/a HTTP/11",
        b"POST /v1/a HTTP/1.10",
        b"POST  HTTP/1.1",
    ),
    *(
        b"PO\x00ST /v1/a HTTP/1.1",
        b"post /v1/a HTTP/1.1",
        b"SMUGGLE /v1/a HTTP/1.1",
        b"POST a HTTP/1.1",
        b"POST ../a HTTP/1.1",
    ),
    *(b"POST t:80 HTTP/1.1", b"CONNECT t:80 HTTP/1.1", b"POST ftp://t/a HTTP/1.1", b"POST http:/a HTTP/1.1"),
)

CASES = [
    # The length of a body.
    *refused(*(post(b"content-length: %b\r\n" % number, b"abc" + SMUGGLED) for number in NUMBERS)),
    *refused(*(post(b"transfer-encoding: %b\r\n" % encoding, ABC + SMUGGLED) for encoding in ENCODINGS)),
    *refused(*(post(b"content-length: 3\r\n%b\r\n" % field, b"abc" + SMUGGLED) for field in FIELDS)),
    *refused(*(post(b"%b\r\ncontent-length: 3\r\n" % field, b"abc" + SMUGGLED) for field in FIELDS)),
    *refused(
        chunked(ABC + SMUGGLED, b"content-length: 13\r\n"),
        chunked(ABC + SMUGGLED, b"content-length: 0\r\n"),
        chunked(ABC + SMUGGLED, b"transfer-encoding: chunked\r\n"),
        chunked(ABC + SMUGGLED, b"transfer-encoding: identity\r\n"),
        chunked(ABC + SMUGGLED).replace(b"1.1", b"1.0", 1),
        post(b"transfer-encoding: \r\n chunked\r\n", ABC + SMUGGLED),
        post(b"content-length: \r\n 3\r\n", b"abc" + SMUGGLED),
        post(b"content-length: 3\r\n 0\r\n", b"abc" + SMUGGLED),
    ),
    accepted(post(b"content-length: 3  \r\n", b"abc"), b"abc"),
    accepted(post(b"content-length:\t3\r\n", b"abc"), b"abc"),
    accepted(post(b"Content-LENGTH:003\r\n", b"abc"), b"abc"),
    accepted(post(b"content-length: 0\r\n")),
    accepted(post(b"")),
    accepted(post(b"content-length: 38\r\n", SMUGGLED), SMUGGLED),
    accepted(post(b"transfer_encoding: chunked\r\ncontent-length: 3\r\n", b"abc"), b"abc"),
    accepted(post(b"content-length: 3\r\nx-content-length: 0\r\n", b"abc"), b"abc"),
    accepted(post(b"content-length: 3\r\nte: chunked\r\n", b"abc"), b"abc"),
    accepted(post(b"content-length: 3\r\n", b"abc", b"GET /v1/a HTTP/1.1"), b"abc", method="GET"),
    # Chunks.
    *refused(*(chunked(chunks + SMUGGLED) for chunks in CHUNKS)),
    accepted(chunked(ABC), b"abc"),
    accepted(post(b"Transfer-Encoding: ChunKed\r\n", ABC), b"abc"),
    accepted(post(b"transfer-encoding: chunked \r\n", ABC), b"abc"),
    accepted(chunked(b"3;x=y\r\nabc\r\n0;z\r\n\r\n"), b"abc"),
    accepted(chunked(b'3;x="0;y"\r\nabc\r\n0\r\n\r\n'), b"abc"),
    accepted(chunked(b"0003\r\nabc\r\n000\r\n\r\n"), b"abc"),
    accepted(chunked(b"26\r\n" + SMUGGLED + b"\r\n0\r\n\r\n"), SMUGGLED),
    accepted(chunked(b"3\r\nabc\r\n0\r\nx: y\r\nhost: u\r\n\r\n"), b"abc"),
    # The request line.
    *refused(*(post(b"", SMUGGLED, line) for line in LINES)),
    accepted(post(b"", line=b"POST http://elsewhere/v1/a HTTP/1.1")),
    accepted(post(b"", line=b"POST HTTP://u:p@elsewhere:1/v1/a?b HTTP/1.1")),
    accepted(post(b"", line=b"POST http://elsewhere HTTP/1.1"), path="/"),
    accepted(post(b"", line=b"POST /v1//elsewhere/a HTTP/1.1"), path="/v1//elsewhere/a"),
    accepted(post(b"", line=b"POST /v1/a%0d%0ax: HTTP/1.1"), path="/v1/a\r\nx:"),
    accepted(post(b"", line=b"POST /v1/a%00 HTTP/1.1"), path="/v1/a\0"),
    accepted(post(b"", line=b"POST  /v1/a HTTP/1.1")),
    accepted(b"\r\n\r\n" + post(b"")),
    # Host.
    *refused(
        b"POST /v1/a HTTP/1.1\r\n\r\n" + SMUGGLED,
        post(b"host: t\r\n", SMUGGLED),
        post(b"Host: u\r\n", SMUGGLED),
        post(b"HOST : u\r\n", SMUGGLED),
        post(b"", SMUGGLED, b"POST /v1/a HTTP/1.0", b"t\r\nhost: u"),
        post(b"", SMUGGLED, host=b"t\x00"),
        post(b"", SMUGGLED, host=b"t\r\n u"),
    ),
    accepted(post(b"", host=b"")),
    # Connections.
    Case(post(b"connection: close\r\n", SMUGGLED), (("POST", "/v1/a", b""),)),
    Case(post(b"connection: x, Close\r\n", SMUGGLED), (("POST", "/v1/a", b""),)),
    Case(post(b"", SMUGGLED, b"POST /v1/a HTTP/1.0"), (("POST", "/v1/a", b""),)),
    Case(
        post(b"content-length: 3\r\nconnection: close\r\n", b"abc" + SMUGGLED), (("POST", "/v1/a", b"abc"),)
    ),
    accepted(post(b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 38\r\n", SMUGGLED), SMUGGLED),
    accepted(post(b"connection: upgrade\r\nupgrade: h2c\r\ntransfer-encoding: chunked\r\n", ABC), b"abc"),
    accepted(post(b"connection: upgrade\r\nupgrade: websocket\r\n")),
    accepted(post(b"connection: content-length\r\ncontent-length: 3\r\n", b"abc"), b"abc"),
    accepted(post(b"connection: x-y\r\nx-y: 1\r\nkeep-alive: 5\r\ncontent-length: 3\r\n", b"abc"), b"abc"),
]

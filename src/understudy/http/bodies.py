"""Decode bodies. Their size, depth and number of lists and objects are checked before anything is built."""

from __future__ import annotations

import gc
import json
import re
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_BODY_DEPTH = 64
MAX_CONTAINERS = 100_000
"""Lists and objects in a body: each takes some 100 bytes here, and time that other requests wait."""
LARGE_BODY_BYTES = 256 * 1024
"""Larger bodies are decoded in a thread.

Building values holds Python's lock: the loop runs during the scan for depth and the slower decoder, and waits for the
faster one, about 10 ms for a megabyte.
"""

_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_OTHERS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_SLICE = 1 << 16
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Decoded(NamedTuple):
    """The value of a body, or the error of invalid JSON."""

    value: Any = None
    error: str = ""
    """Empty: `value` is valid."""
    place: int = 0
    """Offset of the error, in characters."""
    is_utf8: bool = True
    half_character: str | None = None
    """Path of a text with half of a surrogate pair, as `body.a.0`: it cannot be encoded as UTF-8."""


def decode(data: bytes, max_depth: int) -> Decoded:
    """Decode JSON of at most `max_depth` levels; errors are returned, not raised."""
    too_much = structure_error(data, max_depth)
    if too_much:
        return Decoded(error=too_much)
    try:
        with _no_collections() if len(data) > LARGE_BODY_BYTES else nullcontext():
            return Decoded(msgspec.json.decode(data))
    except RecursionError:
        return Decoded(error=_too_deep(max_depth))
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    # The slower decoder reports the error's place, and accepts NaN, other encodings and halves of surrogate pairs.
    is_utf8 = _is_utf8(data)
    try:
        with _no_collections():
            value = json.loads(data)
    except RecursionError:
        return Decoded(error=_too_deep(max_depth))
    except json.JSONDecodeError as error:
        return Decoded(error=f"not JSON: {error.msg}", place=error.pos, is_utf8=is_utf8)
    except ValueError as error:  # an encoding that is none, or a number of absurd length
        return Decoded(error=f"not JSON: {error}", is_utf8=is_utf8)
    has_halves = not is_utf8 or b"\0" in data or _SURROGATE.search(data) is not None
    return Decoded(value, is_utf8=is_utf8, half_character=_half_character(value) if has_halves else None)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Suspend garbage collection: decoded JSON has no cycles, and searching it for them takes most of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def structure_error(data: bytes, max_depth: int) -> str:
    """Return the limit that the brackets outside of strings exceed; "" if none. Linear."""
    if data.count(b"[") + data.count(b"{") <= min(max_depth, MAX_CONTAINERS):
        return ""  # most bodies, whatever their encoding
    encoding = json.detect_encoding(data)
    if not encoding.startswith("utf-8"):
        data = data.decode(encoding, "replace").encode()
    if b"\\" in data:  # escaped quotes end no string
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = data.translate(None, _OTHERS)
    containers, depth, in_string = 0, 0, 0
    for start in range(0, len(marks), _SLICE):
        part = np.frombuffer(marks, np.uint8, min(_SLICE, len(marks) - start), start)
        inside = np.bitwise_xor.accumulate((part == ord('"')).view(np.uint8)) ^ in_string
        steps = _STEP[part] * (1 - inside).view(np.int8)
        depths = np.cumsum(steps, dtype=np.int32) + depth
        if depths.max() > max_depth:
            return _too_deep(max_depth)
        containers += int(np.count_nonzero(steps > 0))
        if containers > MAX_CONTAINERS:
            return f"more than {MAX_CONTAINERS} lists and objects; split the request"
        depth, in_string = int(depths[-1]), int(inside[-1])
    return ""


def _too_deep(max_depth: int) -> str:
    return f"nested deeper than {max_depth} levels; send it flatter, or raise --max-request-body-depth"


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _half_character(value: Any) -> str | None:
    left: list[tuple[str, Any]] = [("body", value)]
    while left:
        where, part = left.pop()
        if isinstance(part, str):
            if not _encodes(part):
                return where
        elif isinstance(part, list):
            left.extend((f"{where}.{place}", member) for place, member in enumerate(part))
        elif isinstance(part, dict):
            if not all(map(_encodes, part)):
                return where
            left.extend((f"{where}.{name}", member) for name, member in part.items())
    return None


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""Decode bodies: bounded in size and depth, the depth found before anything is built."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec
import numpy as np

MAX_BODY_BYTES = 32 * 1024 * 1024
MAX_BODY_DEPTH = 64
LARGE_BODY_BYTES = 256 * 1024
"""Larger bodies are decoded in a thread."""

_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")] = 1
_STEP[list(b"]}")] = -1
_OTHERS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_SLICE = 1 << 16


class Decoded(NamedTuple):
    """The value of a body, or why it is no JSON."""

    value: Any = None
    error: str = ""
    """Empty: `value` is valid."""
    place: int = 0
    """Offset of the error, in characters."""
    is_utf8: bool = True
    half_character: str | None = None
    """Where a text has half of a surrogate pair, as `body.a.0`: it is no character, and cannot be sent on."""


def decode(data: bytes, max_depth: int) -> Decoded:
    """Decode JSON of at most `max_depth` levels; what is wrong is returned, not raised."""
    too_deep = Decoded(
        error=f"nested deeper than {max_depth} levels; send it flatter, or raise --max-request-body-depth"
    )
    if is_deeper(data, max_depth):
        return too_deep
    try:
        return Decoded(msgspec.json.decode(data))
    except RecursionError:
        return too_deep
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    # The slower decoder knows where it failed, and takes NaN, other encodings and halves of surrogate pairs.
    is_utf8 = _is_utf8(data)
    try:
        value = json.loads(data)
    except RecursionError:
        return too_deep
    except json.JSONDecodeError as error:
        return Decoded(error=f"not JSON: {error.msg}", place=error.pos, is_utf8=is_utf8)
    except ValueError as error:  # an encoding that is none, or a number of absurd length
        return Decoded(error=f"not JSON: {error}", is_utf8=is_utf8)
    return Decoded(value, is_utf8=is_utf8, half_character=_half_character(value))


def is_deeper(data: bytes, most: int) -> bool:
    """Whether lists and objects are nested deeper than `most`, by the brackets outside of strings. Linear."""
    encoding = json.detect_encoding(data)
    if not encoding.startswith("utf-8"):
        data = data.decode(encoding, "replace").encode()
    if b"\\" in data:  # escaped quotes end no string
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = data.translate(None, _OTHERS)
    if marks.count(b"[") + marks.count(b"{") <= most:
        return False
    depth, in_string = 0, 0
    for start in range(0, len(marks), _SLICE):
        part = np.frombuffer(marks, np.uint8, min(_SLICE, len(marks) - start), start)
        inside = np.bitwise_xor.accumulate((part == ord('"')).view(np.uint8)) ^ in_string
        depths = np.cumsum(_STEP[part] * (1 - inside).view(np.int8), dtype=np.int32) + depth
        if depths.max() > most:
            return True
        depth, in_string = int(depths[-1]), int(inside[-1])
    return False


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

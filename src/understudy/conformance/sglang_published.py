"""KV events of SGLang's scheduler: numbered as step recordings have them, and as a server publishes them."""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from understudy._core import SglangIterations

    CoreEvent = tuple[bool, list[int], int, int, list[tuple[int, int]], bool]


class NumberedEvents:
    """Events of a step; pages are numbered as stored events first name them."""

    def __init__(self, *, has_host: bool) -> None:
        self._has_host = has_host
        self._numbers: dict[int, int] = {}

    def describe(self, events: Iterable[CoreEvent]) -> list[dict[str, Any]]:
        """Describe events as the lines of a recording do."""
        return [self._describe(*event) for event in events]

    def _describe(
        self,
        stored: bool,
        pages: list[int],
        parent: int,
        begin: int,
        tokens: list[tuple[int, int]],
        on_host: bool,
    ) -> dict[str, Any]:
        if stored:
            numbers = [self._numbers.setdefault(page, len(self._numbers)) for page in pages]
        else:
            numbers = [self._numbers[page] for page in pages]
        event: dict[str, Any] = {
            "type": "stored" if stored else "removed",
            "n": len(pages),
            "h": _join([(number, 1) for number in numbers]),
        }
        if stored:
            first, (last, count) = tokens[0][0], tokens[-1]
            before = self._numbers[parent] if begin else None
            event |= {"parent": before, "pos": begin, "first": first, "last": last + count - 1}
        if self._has_host:
            event["medium"] = _medium(on_host)
        return event


class PublishedEvents:
    """Batches of events as a server publishes them, with SGLang's block hashes."""

    def __init__(self, page_size: int, decode_log_interval: int) -> None:
        self._page_size = page_size
        self._interval = decode_log_interval
        self._decodes = 0
        self._opens = True
        self._digests: dict[int, bytes] = {}

    def after(self, result: str | None, loop: SglangIterations) -> list[dict[str, Any]]:
        """Return the batches that an iteration publishes, at most one; `result` is what it processed."""
        if result == "decode":
            self._decodes += 1
        if result is None or (result == "decode" and self._decodes % self._interval):
            return []
        events = [self._describe(*event) for event in loop.take_events()]
        if self._opens:
            self._opens = False
            events.insert(0, {"type": "AllBlocksCleared"})
        return [{"at": result, "events": events}] if events else []

    def _describe(
        self,
        stored: bool,
        pages: list[int],
        parent: int,
        begin: int,
        tokens: list[tuple[int, int]],
        on_host: bool,
    ) -> dict[str, Any]:
        event: dict[str, Any] = {"type": "BlockStored" if stored else "BlockRemoved"}
        if stored:
            self._add_digests(pages, self._digests[parent] if begin else b"", tokens)
        event["block_hashes"] = [_hash(self._digests[page]) for page in pages]
        if stored:
            event |= {
                "parent_block_hash": _hash(self._digests[parent]) if begin else None,
                "token_ids": _join(tokens),
                "block_size": self._page_size,
            }
        return {**event, "medium": _medium(on_host)}

    def _add_digests(self, pages: list[int], before: bytes, tokens: list[tuple[int, int]]) -> None:
        ids = [token for first, count in tokens for token in range(first, first + count)]
        for index, page in enumerate(pages):
            own = ids[index * self._page_size : (index + 1) * self._page_size]
            before = hashlib.sha256(before + struct.pack(f"<{len(own)}I", *own)).digest()
            self._digests[page] = before


def _hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big", signed=True)


def _medium(on_host: bool) -> str:
    return "CPU_PINNED" if on_host else "GPU"


def _join(runs: list[tuple[int, int]]) -> list[list[int]]:
    """Join runs (first, count) that continue each other."""
    out: list[list[int]] = []
    for first, count in runs:
        if out and sum(out[-1]) == first:
            out[-1][1] += count
        else:
            out.append([first, count])
    return out

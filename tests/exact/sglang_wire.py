"""SGLang's KV events as recordings write them."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]


class EventNames:
    """Number block hashes as stored events first name them; `medium` adds where a block is."""

    def __init__(self, page_size: int, *, medium: bool) -> None:
        self._page_size = page_size
        self._medium = medium
        self._numbers: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def named(self, events: list[Any]) -> list[Event]:
        """Describe the events of a step."""
        return [self._describe(event) for event in events if type(event).__name__ != "AllBlocksCleared"]

    def _describe(self, event: Any) -> Event:
        hashes = event.block_hashes
        out: Event
        if type(event).__name__ == "BlockStored":
            begin = 0 if event.parent_block_hash is None else self._ends[event.parent_block_hash]
            for place, value in enumerate(hashes):
                self._numbers.setdefault(value, len(self._numbers))
                self._ends[value] = begin + (place + 1) * self._page_size
            parent = event.parent_block_hash
            out = {"type": "stored", "n": len(hashes), "h": runs([self._numbers[one] for one in hashes])}
            out |= {"parent": None if parent is None else self._numbers[parent], "pos": begin}
            out |= {"first": event.token_ids[0], "last": event.token_ids[-1]}
        else:
            out = {"type": "removed", "n": len(hashes), "h": runs([self._numbers[one] for one in hashes])}
        return {**out, "medium": event.medium} if self._medium else out


def published_batch(kind: str, events: list[Any]) -> Event:
    """Describe a batch as a server publishes it, with SGLang's block hashes."""
    return {"at": kind, "events": [_published(event) for event in events]}


def _published(event: Any) -> Event:
    name = type(event).__name__
    if name == "AllBlocksCleared":
        return {"type": name}
    out: Event = {"type": name, "block_hashes": list(event.block_hashes)}
    if name == "BlockStored":
        out["parent_block_hash"] = event.parent_block_hash
        out |= {"token_ids": runs(list(event.token_ids)), "block_size": event.block_size}
    return {**out, "medium": event.medium}


def runs(numbers: list[int]) -> list[list[int]]:
    """Join consecutive numbers into runs [first, count]."""
    out: list[list[int]] = []
    for number in numbers:
        if out and sum(out[-1]) == number:
            out[-1][1] += 1
        else:
            out.append([number, 1])
    return out

"""Format vLLM's KV events for recordings: hashes become numbers in the order of their first stored event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

if TYPE_CHECKING:
    from collections.abc import Iterable

    from model.vllm_format import KvEvent


class EventNames:
    """Numbers of the block hashes in one recording."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._numbers: dict[Any, int] = {}
        self._positions: dict[Any, int] = {}
        self.stored = 0
        self.removed = 0

    @property
    def numbers(self) -> dict[Any, int]:
        """Numbers of all hashes in stored events of the GPU."""
        return self._numbers

    def named(self, events: Iterable[Any]) -> list[KvEvent]:
        """Format the events of a step; consecutive removals are merged."""
        out: list[KvEvent] = []
        for event in events:
            if getattr(event, "medium", None) == "CPU":
                continue
            if isinstance(event, BlockStored):
                out.append(self._stored(event))
            elif isinstance(event, BlockRemoved):
                gone = [self._numbers[block] for block in event.block_hashes]
                self.removed += len(gone)
                if out and out[-1]["type"] == "removed":
                    out[-1]["n"] += len(gone)
                    out[-1]["h"] += gone
                else:
                    out.append({"type": "removed", "n": len(gone), "h": gone})
            elif isinstance(event, AllBlocksCleared):
                out.append(cast("KvEvent", {"type": "cleared"}))
        return out

    def _stored(self, event: Any) -> KvEvent:
        parent = event.parent_block_hash
        first = 0 if parent is None else self._positions[parent] + self._block_size
        for place, block in enumerate(event.block_hashes):
            self._numbers.setdefault(block, len(self._numbers))
            self._positions[block] = first + place * self._block_size
        self.stored += len(event.block_hashes)
        line: KvEvent = {
            "type": "stored",
            "n": len(event.block_hashes),
            "h": [self._numbers[block] for block in event.block_hashes],
            "parent": None if parent is None else self._numbers[parent],
            "pos": first,
            "first_tokens": list(event.token_ids[:: self._block_size]),
        }
        if getattr(event, "lookahead_token_ids", None) is not None:
            line["lookahead"] = [list(tokens) for tokens in event.lookahead_token_ids]
        return line

"""KV events of a live TensorRT-LLM engine, as `/kv_cache_events` shows them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from understudy._core import TrtEngine
from understudy.server.trtllm.block_hash import V1

if TYPE_CHECKING:
    from collections.abc import Iterable

    from understudy.core_types import TrtCacheEvent
    from understudy.server.core import EngineCore
    from understudy.server.trtllm.block_hash import V2Sha256


class CacheEventLog:
    """Translates the events of one rank, and the names of its blocks if a hasher gives them others."""

    def __init__(self, core: EngineCore, hasher: V2Sha256 | None) -> None:
        self._core = core
        self._hasher = hasher
        self._algorithm = V1 if hasher is None else hasher.algorithm
        self._keys: dict[int, bytes] = {}  # by the engine's hashes
        self._groups: Counter[int] = Counter()  # groups of layers that hold a block, likewise

    def take(self) -> list[dict[str, Any]]:
        """Return the events since the last call, as JSON values."""
        engine = self._core.engine
        if not isinstance(engine, TrtEngine):
            return []
        return [self._translate(event) for event in engine.take_cache_events()]

    def _translate(self, event: TrtCacheEvent) -> dict[str, Any]:
        kind = event["kind"]
        data: dict[str, Any] = {"type": kind}
        if kind == "created":
            data["num_blocks_per_cache_level"] = event["blocks"]
        elif kind == "stored":
            data["parent_hash"] = None if event["parent"] is None else self._show(event["parent"])
            data["blocks"] = list(self._translate_blocks(event))
        elif kind == "removed":
            data["block_hashes"] = [self._show(one) for one in event["blocks"]]
            self._forget(event["blocks"])
        else:
            old, new = event["level"]
            data["block_hash"] = self._show(event["block"])
            data["cache_level"] = {"type": "event_diff", "new_value": new, "old_value": old}
            data["priority"] = None
        return {
            "event_id": event["id"],
            "data": data,
            "window_size": event["window"],
            "hash_algo": self._algorithm,
            "layer_group_id": event["group"],
        }

    def _show(self, known: int) -> int | str:
        """Return the name of a block that the engine knows by a hash of its own."""
        return known if self._hasher is None else self._hasher.show(self._find_key(known))

    def _find_key(self, known: int) -> bytes:
        """Return the key of a block; the engine's own hash for one that was stored before this log began."""
        return self._keys.get(known) or known.to_bytes(8, "big")

    def _forget(self, blocks: Iterable[int]) -> None:
        """Drop the keys of blocks that the last group of layers has removed."""
        for known in blocks:
            self._groups[known] -= 1
            if self._groups[known] <= 0:
                del self._groups[known]
                self._keys.pop(known, None)

    def _translate_blocks(self, event: TrtCacheEvent) -> Iterable[dict[str, Any]]:
        hasher, key = self._hasher, b""
        if hasher is not None:
            parent = event["parent"]
            key = hasher.root(*event["scope"]) if parent is None else self._find_key(parent)
        for known, runs, level, priority, salt in event["blocks"]:
            tokens = [(first + place) & 0xFFFFFFFF for first, count in runs for place in range(count)]
            if hasher is not None:
                self._keys[known] = key = hasher.chain(key, tokens)
                self._groups[known] += 1
            yield {
                "type": "stored_block",
                "block_hash": known if hasher is None else hasher.show(key),
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens
                ],
                "cache_salt": salt,
                "cache_level": level,
                "priority": priority,
                "mm_keys": [],
            }

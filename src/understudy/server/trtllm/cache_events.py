"""KV events of a live TensorRT-LLM engine with the tokens of its blocks, as `/kv_cache_events` shows them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from understudy._core import TrtEngine

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    import numpy.typing as npt

    from understudy.core_types import TrtCacheEvent
    from understudy.server.core import EngineCore
    from understudy.server.live_request import LiveRequest
    from understudy.server.trtllm.block_hash import BlockHasher

_OWN = 1 << 63
"""From here on, the engine numbers tokens of requests whose block has no name."""
_PRIORITY = 35


class CacheEventLog:
    """Translates the events of one rank. The engine knows tokens by the names of their blocks only."""

    def __init__(self, core: EngineCore, hasher: BlockHasher, *, keep_blocks: int) -> None:
        self._core = core
        self._keep_blocks = keep_blocks
        self._tokens: OrderedDict[int, tuple[int, ...]] = OrderedDict()  # by the name of their block
        self._requests: OrderedDict[int, tuple[LiveRequest, tuple[int, ...]]] = OrderedDict()
        self._hasher = hasher
        self._keys: dict[int, bytes] = {}  # by the engine's hashes
        self._groups: Counter[int] = Counter()  # groups of layers that hold a block, likewise

    def remember(self, request: LiveRequest, tokens: npt.NDArray[np.uint32]) -> None:
        """Keep the tokens of a request's blocks, the latest of all requests; before it is submitted."""
        if request.identities is None:
            return
        ids, size = tuple(tokens.tolist()), self._core.block_size
        for place, name in enumerate(request.identities.sequence_hashes.tolist()):
            self._tokens[name] = ids[place * size : (place + 1) * size]
            self._tokens.move_to_end(name)
        while len(self._tokens) > self._keep_blocks:
            self._tokens.popitem(last=False)
        self._requests[id(request)] = (request, ids)
        while len(self._requests) > self._keep_blocks:
            self._requests.popitem(last=False)

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
            parent = event["parent"]
            data["parent_hash"] = None if parent is None else self._show(parent)
            key = self._hasher.root if parent is None else self._find_key(parent)
            data["blocks"] = list(self._translate_blocks(key, event["blocks"]))
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
            "hash_algo": self._hasher.algorithm,
            "layer_group_id": event["group"],
        }

    def _show(self, known: int) -> int | str:
        """Return the name of a block that the engine knows by a hash of its own."""
        return self._hasher.show(self._find_key(known))

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

    def _translate_blocks(self, parent: bytes, blocks: Iterable[Any]) -> Iterable[dict[str, Any]]:
        for known, runs, level, priority, salt in blocks:
            tokens = [token for first, count in runs for token in self._find(first, count)]
            self._keys[known] = parent = self._hasher.chain(parent, tokens)
            self._groups[known] += 1
            yield {
                "type": "stored_block",
                "block_hash": self._hasher.show(parent),
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens
                ],
                "cache_salt": salt,
                "cache_level": level,
                "priority": priority,
                "mm_keys": [],
            }

    def _find(self, first: int, count: int) -> tuple[int, ...]:
        """Return the tokens that the engine numbers from `first`; its own numbers for forgotten ones."""
        named = self._tokens.get(first)
        if named is not None:
            return named[:count]
        engine_id, place = (first - _OWN) >> 24, (first - _OWN) & 0xFFFFFF
        for request, tokens in reversed(self._requests.values()):
            if first >= _OWN and request.engine_id == engine_id:
                return tokens[place : place + count]
        return tuple(range(first & 0x7FFFFFFF, (first & 0x7FFFFFFF) + count))

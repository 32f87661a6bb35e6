"""Names of blocks in TensorRT-LLM's KV events, where they are not those of the engine itself."""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import TYPE_CHECKING

from understudy.engines.trtllm_config import TrtllmConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.engines.engine_config import EngineConfig


class V2Sha256:
    """The key by which KV cache manager V2 itself finds a block: `v2_sha256`."""

    algorithm = "v2_sha256"
    """Name in the events."""

    def root(self, adapter: int | None, salt: int | None) -> bytes:
        """Return the key behind which the first blocks of an adapter and a salt stand."""
        given = [value for value in (adapter, salt) if value is not None]
        mask = (adapter is not None) + 2 * (salt is not None)
        return hashlib.sha256(struct.pack(f"<B{len(given)}Q", mask, *given)).digest()

    def chain(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return the digest of the parent's key and the tokens, four bytes each."""
        ids = array("I", tokens)
        assert ids.itemsize == 4  # on every platform that is supported, and in little-endian order
        return hashlib.sha256(parent + ids.tobytes()).digest()

    def show(self, key: bytes) -> int | str:
        """Return the key in hexadecimal digits."""
        return key.hex()


class V2Sha256Short(V2Sha256):
    """The first 64 bits of the same key: `v2_sha256_64`. Children are chained from the whole key."""

    algorithm = "v2_sha256_64"

    def show(self, key: bytes) -> int:
        """Return the first eight bytes as a number."""
        return int.from_bytes(key[:8], "big")


V1 = "v1_block_key"
"""The default, which is the hash that the engine itself gives its blocks."""
_HASHERS: dict[str, V2Sha256 | None] = {
    "auto": None,
    V1: None,
    "v2_sha256": V2Sha256(),
    "v2_sha256_64": V2Sha256Short(),
}


def find_hasher(engine: EngineConfig) -> V2Sha256 | None:
    """Return the hasher that the engine's settings name; None: blocks have the engine's own names."""
    return _HASHERS[engine.kv_cache_event_hash_algo if isinstance(engine, TrtllmConfig) else "auto"]


def name_algorithm(engine: EngineConfig) -> str:
    """Return the algorithm by which events name blocks."""
    hasher = find_hasher(engine)
    return V1 if hasher is None else hasher.algorithm

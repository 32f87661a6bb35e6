"""Names of blocks in TensorRT-LLM's KV events, by its three algorithms, without adapter and salt."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Protocol

from understudy.engines.trtllm_config import TrtllmConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.engines.engine_config import EngineConfig

_MASK = (1 << 64) - 1
_ROOT = hashlib.sha256(b"\0").digest()
"""Key of the root without adapter and salt."""


class BlockHasher(Protocol):
    """Chains the key of a block from the key of its parent."""

    algorithm: str
    """Name in the events."""
    root: bytes
    """Key behind which first blocks stand."""

    def chain(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return the key of a block."""
        ...

    def show(self, key: bytes) -> int | str:
        """Return the key as events have it."""
        ...


class V1BlockKey:
    """64 bits, mixed token by token: `v1_block_key`, the default."""

    algorithm = "v1_block_key"
    root = bytes(8)

    def chain(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Return the key of a block."""
        seed = len(tokens) ^ (int.from_bytes(parent, "big") * 0xBF58476D1CE4E5B9 & _MASK)
        for token in tokens:
            value = token & 0xFFFFFFFF
            value = ((value >> 16) ^ value) * 0x45D9F3B & 0xFFFFFFFF
            value = ((value >> 16) ^ value) * 0x45D9F3B & 0xFFFFFFFF
            value = ((value >> 16) ^ value) + 0x9E3779B9 & 0xFFFFFFFF
            seed ^= value + (seed << 6 & _MASK) + (seed >> 2) & _MASK
        return seed.to_bytes(8, "big")

    def show(self, key: bytes) -> int:
        """Return the key as a number."""
        return int.from_bytes(key, "big")


class V2Sha256:
    """The key by which KV cache manager V2 itself finds a block: `v2_sha256`."""

    algorithm = "v2_sha256"
    root = _ROOT

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


_HASHERS: dict[str, BlockHasher] = {
    "auto": V1BlockKey(),
    "v1_block_key": V1BlockKey(),
    "v2_sha256": V2Sha256(),
    "v2_sha256_64": V2Sha256Short(),
}


def find_hasher(engine: EngineConfig) -> BlockHasher:
    """Return the hasher that the engine's settings name."""
    name = engine.kv_cache_event_hash_algo if isinstance(engine, TrtllmConfig) else "auto"
    return _HASHERS[name]

"""Salts of TensorRT-LLM: the number that its cache manager keeps of a request's `cache_salt`."""

from __future__ import annotations

import hashlib


def derive_salt(salt: str) -> int:
    """Return the number that TensorRT-LLM keeps of a `cache_salt`."""
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little")

"""Text into hash ids: what prompts share, without the text itself.

A prompt is cut into blocks of a fixed number of tokens; a block's id is a number for a keyed hash of everything up to
its end, so that equal ids mean equal prefixes and nothing can be read back. Tokens come from a tokenizer's file, or are
runs of bytes: a stated approximation.
"""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.workload.columns import Int64Column, UInt32Column

BYTES_PER_TOKEN = 4.0
"""Of English text under common tokenizers, about: what is assumed where nothing tells."""


class Encoder(Protocol):
    """Cuts text into units."""

    units_per_token: float
    """1 where a unit is a token of the model."""

    def encode(self, text: str) -> NDArray[np.uint32]:
        """The units of the text."""


class BytesEncoder:
    """Units are bytes of UTF-8. Prefixes are found as exactly as text tells; lengths are approximate."""

    def __init__(self, bytes_per_token: float = BYTES_PER_TOKEN) -> None:
        self.units_per_token = bytes_per_token

    def encode(self, text: str) -> NDArray[np.uint32]:
        """One unit a byte."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


class TokenizerEncoder:
    """Units are tokens of a Hugging Face `tokenizer.json`, read from disk (needs the `tokenizers` extra)."""

    units_per_token = 1.0

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                "a tokenizer needs the tokenizers package (pip install 'understudy[tokenizers]'); without one, bytes "
                "are counted"
            ) from error
        if not Path(path).is_file():
            raise ConfigError(f"tokenizer {path!r} is no file: give the path of a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the package raises nothing more specific
            raise ConfigError(f"tokenizer {path!r} cannot be read: {error}") from error

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Token ids, without special tokens around them."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)


class PromptHasher:
    """Turns prompts into hash ids, numbered by first appearance; one object for all prompts that may share prefixes.

    Hashes are keyed with a secret that is the object's own, and only their numbers leave it.
    """

    def __init__(self, block_size: int, units_per_token: float) -> None:
        self._units_per_block = block_size * units_per_token
        self._block_size = block_size
        self._key = secrets.token_bytes(16)
        self._numbers: dict[bytes, int] = {}

    def ids(self, units: NDArray[np.uint32], tokens: int) -> list[int]:
        """An id for each block of a prompt of `tokens` tokens, whatever its units say of its length."""
        rolling = hashlib.blake2b(key=self._key, digest_size=16)
        found, start = [], 0
        for block in range(-(-tokens // self._block_size)):
            end = round((block + 1) * self._units_per_block)
            rolling.update(units[start:end].tobytes())
            found.append(self._numbers.setdefault(rolling.digest(), len(self._numbers)))
            start = end
        return found


def unique_ids(prompt_tokens: Int64Column, block_size: int) -> tuple[Int64Column, UInt32Column]:
    """Offsets and ids of prompts of which only the lengths are known: no two share a block."""
    offsets = np.zeros(len(prompt_tokens) + 1, np.int64)
    np.cumsum(-(-prompt_tokens // block_size), out=offsets[1:])
    return offsets, np.arange(int(offsets[-1]), dtype=np.uint32)

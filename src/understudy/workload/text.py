"""Convert text to hash ids, which keep shared prefixes but not the text.

A prompt is split into blocks of a fixed number of tokens; a block's id numbers a keyed hash of everything up to its
end, so equal ids mean equal prefixes and the text cannot be recovered. Tokens come from a tokenizer file, or are
approximated by runs of bytes.
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
"""Approximate bytes per token of English text under common tokenizers; the default without usage data."""


class Encoder(Protocol):
    """Splits text into units."""

    units_per_token: float
    """1 if a unit is a token of the model."""

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Split the text into units."""


class BytesEncoder:
    """Splits text into UTF-8 bytes: shared prefixes are exact, token lengths approximate."""

    def __init__(self, bytes_per_token: float = BYTES_PER_TOKEN) -> None:
        self.units_per_token = bytes_per_token

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return one unit per byte."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)


class TokenizerEncoder:
    """Splits text into tokens of a local Hugging Face `tokenizer.json` (needs the `tokenizers` extra)."""

    units_per_token = 1.0

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                "tokenizer needs the tokenizers package; pip install 'understudy[tokenizers]', or leave it out to "
                "estimate from bytes"
            ) from error
        if not Path(path).is_file():
            raise ConfigError(f"tokenizer {path!r} is not a file; give the path of a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the package raises nothing more specific
            raise ConfigError(f"tokenizer {path!r} cannot be read: {error}") from error

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Return the token ids, without special tokens at the ends."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)


class PromptHasher:
    """Converts prompts to hash ids, numbered by first appearance; use one object for prompts that share prefixes.

    Hashes are keyed with a random secret of the object; only their numbers are returned.
    """

    def __init__(self, block_size: int, units_per_token: float) -> None:
        self._units_per_block = block_size * units_per_token
        self._block_size = block_size
        self._key = secrets.token_bytes(16)
        self._numbers: dict[bytes, int] = {}

    def ids(self, units: NDArray[np.uint32], tokens: int) -> list[int]:
        """Return an id for each block of a prompt of `tokens` tokens; `tokens` overrides the number of units."""
        rolling = hashlib.blake2b(key=self._key, digest_size=16)
        found, start = [], 0
        for block in range(-(-tokens // self._block_size)):
            end = round((block + 1) * self._units_per_block)
            rolling.update(units[start:end].tobytes())
            found.append(self._numbers.setdefault(rolling.digest(), len(self._numbers)))
            start = end
        return found


def unique_ids(prompt_tokens: Int64Column, block_size: int) -> tuple[Int64Column, UInt32Column]:
    """Return CSR offsets and unique block ids for prompts whose content is unknown."""
    offsets = np.zeros(len(prompt_tokens) + 1, np.int64)
    np.cumsum(-(-prompt_tokens // block_size), out=offsets[1:])
    return offsets, np.arange(int(offsets[-1]), dtype=np.uint32)

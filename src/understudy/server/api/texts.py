"""Tokens as text, once and for all: the JSON of every token that stands for itself."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.server.tokenizer import Tokenizer


KeptKey = tuple[str, bool, int, int]
Kept = tuple[str, float, msgspec.Raw]
MAX_KEPT_BYTES = 1 << 24


class TokenTexts:
    """The text of tokens in a stream, where a character may be spread over several of them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.words = tokenizer.words()
        """The tokenizer's: those of a directory take it seconds to find."""
        self.plain: dict[int, bytes] = {token: self._json(token) or b"" for token in self.words}
        """The JSON of tokens of which every run reads as the sum of its parts, without the quotes."""
        self.logprobs: dict[KeptKey, Kept] = {}
        """What was made up for a token and is the same every time: its text, its own one and the JSON of all."""
        self._kept_bytes = 0

    def keep_logprobs(self, key: KeptKey, made: Kept) -> None:
        """They will be asked for again; not all of them can be kept."""
        size = len(bytes(made[2])) + 256
        if self._kept_bytes + size > MAX_KEPT_BYTES:
            self.logprobs.clear()
            self._kept_bytes = 0
        self._kept_bytes += size
        self.logprobs[key] = made

    def is_plain(self, tokens: Sequence[int]) -> bool:
        """Whether all of them stand for themselves."""
        plain = self.plain
        return all(token in plain for token in tokens)

    def pieces(self, tokens: Sequence[int], *, skip_special: bool = True) -> list[str]:
        """What each token adds to the text; nothing where a character is not complete yet."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        special = self.special if skip_special else frozenset()
        out = [
            decoder.decode(b"" if token in special else self.tokenizer.token_bytes(token)) for token in tokens
        ]
        rest = decoder.decode(b"", final=True)
        if rest and out:
            out[-1] += rest
        return out

    @property
    def special(self) -> frozenset[int]:
        """Tokens that are not text."""
        special = getattr(self.tokenizer, "special", None)
        return frozenset(special.values()) if special else frozenset({self.tokenizer.end_id})

    def _json(self, token: int) -> bytes | None:
        try:
            text = self.tokenizer.token_bytes(token).decode("utf-8")
        except UnicodeDecodeError:
            return None
        return msgspec.json.encode(text)[1:-1]


def json_text(text: str) -> bytes:
    """A string as JSON, without its quotes. Lone surrogates, which JSON can say and UTF-8 cannot, become '?'."""
    try:
        return msgspec.json.encode(text)[1:-1]
    except (UnicodeEncodeError, ValueError):
        return msgspec.json.encode(text.encode("utf-8", "replace").decode())[1:-1]

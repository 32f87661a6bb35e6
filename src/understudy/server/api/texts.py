"""Text of tokens, cached: the JSON of every token that decodes on its own."""

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
    """Decodes tokens in a stream, where a character may span several tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.words = tokenizer.words()
        """The tokenizer's word tokens; a tokenizer from a directory needs seconds to list them."""
        self.plain: dict[int, bytes] = {token: self._json(token) or b"" for token in self.words}
        """JSON, without quotes, of the tokens that decode independently of their neighbours."""
        self.logprobs: dict[KeptKey, Kept] = {}
        """Cache of synthetic logprobs by token: its text, its logprob and the JSON of all."""
        self._kept_bytes = 0

    def keep_logprobs(self, key: KeptKey, made: Kept) -> None:
        """Cache synthetic logprobs; clear the cache when it exceeds `MAX_KEPT_BYTES`."""
        size = len(bytes(made[2])) + 256
        if self._kept_bytes + size > MAX_KEPT_BYTES:
            self.logprobs.clear()
            self._kept_bytes = 0
        self._kept_bytes += size
        self.logprobs[key] = made

    def is_plain(self, tokens: Sequence[int]) -> bool:
        """Return True if all tokens decode independently."""
        plain = self.plain
        return all(token in plain for token in tokens)

    def pieces(self, tokens: Sequence[int], *, skip_special: bool = True) -> list[str]:
        """Return the text that each token adds; "" while a character is incomplete."""
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
        """Special tokens, which are not text."""
        special = getattr(self.tokenizer, "special", None)
        return frozenset(special.values()) if special else frozenset({self.tokenizer.end_id})

    def _json(self, token: int) -> bytes | None:
        try:
            text = self.tokenizer.token_bytes(token).decode("utf-8")
        except UnicodeDecodeError:
            return None
        return msgspec.json.encode(text)[1:-1]


def json_text(text: str) -> bytes:
    """Encode a string as JSON without quotes. Lone surrogates, which UTF-8 cannot encode, become '?'."""
    try:
        return msgspec.json.encode(text)[1:-1]
    except (UnicodeEncodeError, ValueError):
        return msgspec.json.encode(text.encode("utf-8", "replace").decode())[1:-1]

"""The answer of a real engine, which grows token by token."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.server.api.sampling import Sampling
    from understudy.server.api.texts import TokenTexts


class GrowingPlan:
    """The answer so far, with the interface of `Plan`. `total` exceeds the length until the answer has ended.

    Text that may begin a stop string is held back, and so are the bytes of an incomplete character.
    """

    def __init__(self, sampling: Sampling, texts: TokenTexts, limit: int, end_ids: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[tuple[float, Sequence[tuple[int, float]]] | None] = []
        """Logprobs of each token: its own and those of the likeliest tokens."""
        self.limit = self.max_tokens = limit
        self.total = limit + 1
        self.finish = ""
        self.stop_reason: str | int | None = None
        self.stopped = False
        """True when the engine would continue and must cancel the request."""
        self.eos_at: int | None = None
        self._sampling = sampling
        self._tokenizer = texts.tokenizer
        self._ends = frozenset() if sampling.ignore_eos else end_ids
        self._stops = frozenset(sampling.stop_token_ids)
        self._special = texts.special if sampling.skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def take(
        self, token: int, logprobs: tuple[float, Sequence[tuple[int, float]]] | None = None, *, last: bool
    ) -> None:
        """Add a token; `last` marks the engine's final one."""
        self.tokens.append(token)
        self.logprobs.append(logprobs)
        count, early = len(self.tokens), len(self.tokens) < self._sampling.min_tokens
        hidden = token in self._special or not 0 <= token < self._tokenizer.vocabulary
        text = self._held + self._decoder.decode(b"" if hidden else self._tokenizer.token_bytes(token))
        if not early and token in self._ends | self._stops:
            self._end("stop", stop_reason=None if token in self._ends else token, stopped=not last)
        elif not early and (found := self._find_stop(text)) is not None:
            place, stop = found
            text = text[: place + len(stop)] if self._sampling.include_stop else text[:place]
            self._end("stop", stop_reason=stop, stopped=not last)
            self._append_piece(text, 0)
            return
        elif last:
            self._end("length", stop_reason=None, stopped=False)
        if self.total == count:
            self._append_piece(text + self._decoder.decode(b"", final=True), 0)
        else:
            self._append_piece(text, max((len(stop) for stop in self._sampling.stop), default=1) - 1)

    def cut(self, count: int, why: str) -> GrowingPlan:
        """End the answer after `count` tokens, for the reason `why`."""
        for column in (self.tokens, self.pieces, self.logprobs):
            del column[count:]
        self._end(why, stop_reason=None, stopped=False)
        return self

    def text(self, _: TokenTexts, count: int) -> str:
        """Return the visible text of the first `count` tokens."""
        return "".join(self.pieces[:count])

    def _end(self, finish: str, *, stop_reason: str | int | None, stopped: bool) -> None:
        self.finish, self.stop_reason, self.stopped = finish, stop_reason, stopped
        self.total = len(self.tokens)

    def _append_piece(self, text: str, hold: int) -> None:
        seen = text[: len(text) - hold] if hold else text
        self.pieces.append(seen)
        self._held = text[len(seen) :]

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Find the stop string that is complete first; return its place and text."""
        found = [
            (place + len(stop), order, place, stop)
            for order, stop in enumerate(self._sampling.stop)
            if (place := text.find(stop)) >= 0
        ]
        return min(found)[2:] if found else None

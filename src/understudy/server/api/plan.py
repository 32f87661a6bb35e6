"""A planned answer: its tokens, its end and finish reason, and the visible text after each token."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from understudy.server.api.sampling import Sampling
    from understudy.server.api.texts import TokenTexts
    from understudy.server.outputs import Answer

CHOICE_COST = 64
"""Fixed cost of an answer, as that of so many generated tokens."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A planned answer.

    The engine generates `engine_tokens`; the answer ends after `total` of them, for `finish`. At a stop string the
    engine would continue, so the server cancels the request.
    """

    tokens: list[int]
    total: int
    engine_tokens: int
    finish: str
    limit: int
    """Most tokens that the answer may have."""
    ends_itself: bool = False
    """True when the engine itself ends the request, at an end token."""
    stop_reason: str | int | None = None
    pieces: list[str] | None = None
    """Text that becomes visible with each token; None: the text of the token itself."""

    @property
    def stopped(self) -> bool:
        """True when the server must cancel the engine request."""
        return self.total < self.engine_tokens and not self.ends_itself

    @property
    def max_tokens(self) -> int:
        """Limit that the scheduler knows: the client's, unless the server cancels the request before."""
        return self.limit if self.ends_itself else self.engine_tokens

    @property
    def eos_at(self) -> int | None:
        """Index of the output that ends the request, if one does."""
        return self.total if self.ends_itself else None

    def cut(self, count: int, why: str) -> Plan:
        """Return a copy that ends after `count` tokens, for the reason `why`."""
        return msgspec.structs.replace(self, total=count, finish=why, stop_reason=None)

    def text(self, texts: TokenTexts, count: int) -> str:
        """Return the visible text of the first `count` tokens."""
        if self.pieces is None:
            return texts.tokenizer.decode(self.tokens[:count])
        return "".join(self.pieces[:count])


def plan_answer(answer: Answer, sampling: Sampling, texts: TokenTexts) -> Plan:
    """Plan the end of an answer: at its natural end, a stop token, a stop string, or its length."""
    tokens: list[int] = answer.tokens.tolist()
    total = len(tokens)
    finish, reason = ("stop", None) if answer.stops else ("length", None)
    # An invisible token after the end, so that the length does not end the request.
    beyond = tokens[-1:] if answer.stops and answer.room > total else []
    plan = Plan(
        tokens=tokens + beyond,
        total=total,
        engine_tokens=total + len(beyond),
        finish=finish,
        limit=answer.room,
        stop_reason=reason,
        ends_itself=answer.stops,
    )
    if sampling.stop_token_ids:
        stops = set(sampling.stop_token_ids)
        for place, token in enumerate(tokens):
            if token in stops and place + 1 >= max(sampling.min_tokens, 1):
                plan = Plan(
                    tokens=tokens[: place + 2],
                    total=place + 1,
                    engine_tokens=len(tokens[: place + 2]),
                    finish="stop",
                    limit=answer.room,
                    stop_reason=token,
                    ends_itself=place + 1 < len(tokens),
                )
                break
    if sampling.stop:
        return _stop_at_text(plan, sampling, texts)
    if texts.is_plain(plan.tokens):
        return plan
    pieces = texts.pieces(plan.tokens[: plan.total], skip_special=sampling.skip_special)
    return msgspec.structs.replace(plan, pieces=pieces)


def _stop_at_text(plan: Plan, sampling: Sampling, texts: TokenTexts) -> Plan:
    pieces = texts.pieces(plan.tokens[: plan.total], skip_special=sampling.skip_special)
    ends = list(accumulate(len(piece) for piece in pieces))
    text = "".join(pieces)
    start = ends[sampling.min_tokens - 1] if 0 < sampling.min_tokens <= len(ends) else 0
    best: tuple[int, int, int, str] | None = None
    for order, stop in enumerate(sampling.stop):
        place = text.find(stop, max(start - len(stop) + 1, 0))
        if place < 0:
            continue
        last = next(index for index, end in enumerate(ends) if end >= place + len(stop))
        if best is None or (last, order) < best[:2]:
            best = (last, order, place, stop)
    held = max(len(stop) for stop in sampling.stop) - 1
    total = plan.total
    cut = len(text)
    if best is not None:
        last, _, place, stop = best
        total = last + 1
        cut = place + len(stop) if sampling.include_stop else place
        plan = msgspec.structs.replace(plan, total=total, finish="stop", stop_reason=stop, ends_itself=False)
    seen = 0
    visible: list[str] = []
    for index in range(total):
        until = cut if index == total - 1 else max(min(ends[index] - held, cut), seen)
        visible.append(text[seen:until])
        seen = max(seen, until)
    return msgspec.structs.replace(plan, pieces=visible)

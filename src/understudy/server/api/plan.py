"""An answer before it is given: its tokens, where it ends and why, and what of it can be seen after each token."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from understudy.server.api.sampling import Sampling
    from understudy.server.api.texts import TokenTexts
    from understudy.server.outputs import Answer


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What will be said.

    The engine generates `engine_tokens`; the answer ends after `total` of them, for `finish`. Where a stop string
    ends it, the engine would have gone on, and is told to drop the request then.
    """

    tokens: list[int]
    total: int
    engine_tokens: int
    finish: str
    limit: int
    """Tokens that it was allowed to have."""
    ends_itself: bool = False
    """The engine sees the token that ends it: it need not be told to drop it."""
    stop_reason: str | int | None = None
    pieces: list[str] | None = None
    """Text that becomes visible with each token; None: the token's own, all of them plain."""

    @property
    def stopped(self) -> bool:
        """Whether the engine is to drop it."""
        return self.total < self.engine_tokens and not self.ends_itself

    @property
    def eos_at(self) -> int | None:
        """Which output ends it, where one does."""
        return self.total if self.ends_itself else None

    def cut(self, count: int, why: str) -> Plan:
        """The same, ended from outside after so many tokens."""
        return msgspec.structs.replace(self, total=count, finish=why, stop_reason=None)

    def text(self, texts: TokenTexts, count: int) -> str:
        """What can be seen of its first `count` tokens."""
        if self.pieces is None:
            return texts.tokenizer.decode(self.tokens[:count])
        return "".join(self.pieces[:count])


def plan_answer(answer: Answer, sampling: Sampling, texts: TokenTexts) -> Plan:
    """Where the answer ends: by itself, at a stop token, at a stop string, or at its length."""
    tokens: list[int] = answer.tokens.tolist()
    total = len(tokens)
    finish, reason = ("stop", None) if answer.stops else ("length", None)
    # A token behind the end, which nobody gets to see: the length is not what ends it.
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

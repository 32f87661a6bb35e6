"""A step that is being put together: who is in it, and what the executor is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from understudy.qwen3.batch import Chunk, Decode
from understudy.qwen3.executor import Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.qwen3.request import Request


@dataclass(slots=True)
class Plan:
    """The requests of a step, in the order of its rows. Each is scheduled as it is added, and its view taken."""

    step: Step = field(default_factory=Step)
    chunks: list[Request] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        """All of them."""
        return self.chunks + self.decodes

    def add_decode(self, request: Request) -> None:
        """It feeds its last token."""
        request.held.schedule_decode()
        self.decodes.append(request)
        self.step.decodes.append(Decode(request.output[-1], request.held.view()))
        self.step.draws.append(request.draw())

    def add_chunk(self, request: Request, budget: int) -> int:
        """The next of its prompt, `budget` tokens at most; returns how many."""
        kv = request.held
        start = kv.computed_tokens
        tokens = min(budget, kv.prefill_target - start)
        kv.schedule_prefill(tokens)
        at = len(self.chunks)  # chunks stand before decodes
        self.chunks.append(request)
        self.step.chunks.append(Chunk(kv.tokens[start : start + tokens], kv.view()))
        self.step.draws.insert(at, request.draw())
        return tokens

    def following(self) -> Plan:
        """The same decodes, one token later, which is still open. Its blocks are taken."""
        later = Plan(Step(ahead=True), decodes=list(self.decodes))
        for request in self.decodes:
            view = request.held.view_ahead()
            assert view is not None, "its output does not end here"
            later.step.decodes.append(Decode(0, view))
            later.step.draws.append(request.draw(1))
        return later

    def feed(self, tokens: Sequence[int]) -> None:
        """What was still open."""
        rows = zip(tokens, self.step.decodes, strict=True)
        self.step.decodes = [Decode(token, decode.view) for token, decode in rows]

    def revert(self) -> None:
        """The step did not happen: every request of it is where it was before."""
        for request in self.requests:
            if request.kv is not None and request.kv.state not in ("idle", "closed"):
                request.kv.revert()

"""A step under construction: its requests, and the executor's input."""

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
    """Requests of a step in the order of its rows. Adding a request schedules it and takes its view."""

    step: Step = field(default_factory=Step)
    chunks: list[Request] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)

    @property
    def requests(self) -> list[Request]:
        """All requests: chunks, then decodes."""
        return self.chunks + self.decodes

    def add_decode(self, request: Request) -> None:
        """Add a decode of the request's last token."""
        request.held.schedule_decode()
        self.decodes.append(request)
        self.step.decodes.append(Decode(request.output[-1], request.held.view()))
        self.step.draws.append(request.draw())

    def add_chunk(self, request: Request, budget: int) -> int:
        """Add the next part of a prompt, at most `budget` tokens; return its number of tokens."""
        kv = request.held
        start = kv.computed_tokens
        tokens = min(budget, kv.prefill_target - start)
        kv.schedule_prefill(tokens)
        at = len(self.chunks)  # chunks are before decodes
        self.chunks.append(request)
        self.step.chunks.append(Chunk(kv.tokens[start : start + tokens], kv.view()))
        self.step.draws.insert(at, request.draw())
        return tokens

    def build_next(self) -> Plan:
        """Build the same decodes one token later, with unknown input tokens. Allocates their blocks."""
        later = Plan(Step(ahead=True), decodes=list(self.decodes))
        for request in self.decodes:
            view = request.held.view_ahead()
            assert view is not None, "the output continues"
            later.step.decodes.append(Decode(0, view))
            later.step.draws.append(request.draw(1))
        return later

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """Set the input tokens, which were unknown."""
        rows = zip(tokens, self.step.decodes, strict=True)
        self.step.decodes = [Decode(token, decode.view) for token, decode in rows]

    def revert(self) -> None:
        """Roll back every request of the step."""
        for request in self.requests:
            if request.kv is not None and request.kv.state not in ("idle", "closed"):
                request.kv.revert()

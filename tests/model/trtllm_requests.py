"""A slow model of TensorRT-LLM's executor: its requests and batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.conformance.trtllm_recording import TrtRequest

CONTEXT, GENERATION, TO_COMPLETE, DONE = 10, 13, 14, 20


class Deadlock(Exception):
    """No request can be scheduled, suspended or paused."""


@dataclass(eq=False)
class Request:
    """A request of the executor."""

    number: int
    given: TrtRequest
    tokens: list[int]
    max_new: int
    prompt: int = 0
    position: int = 0
    reused: int = 0
    chunk: int = 0
    state: int = CONTEXT
    outputs: int = 0

    @property
    def left(self) -> int:
        return self.prompt - self.position

    @property
    def is_started(self) -> bool:
        return (self.state == CONTEXT and self.position != self.reused) or self.state in (
            GENERATION,
            TO_COMPLETE,
        )

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt


@dataclass
class Batch:
    """Requests of a forward pass."""

    contexts: list[Request] = field(default_factory=list)
    generation: list[Request] = field(default_factory=list)
    ending: list[Request] = field(default_factory=list)
    """Prompts whose last chunk it has, and the requests in generation: each gets a token."""


@dataclass
class Round:
    """Ends of the two searches of a scheduling round."""

    end: int
    frontier: int

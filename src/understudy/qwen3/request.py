"""Requests and outputs of the real engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from understudy.errors import InvalidArgument
from understudy.qwen3.sampling import GREEDY, Draw, Logprobs, SamplingParams, draw_uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from understudy.kv import RegisteredBlocks, RequestKv
    from understudy.qwen3.host import Copy
    from understudy.tokens import TokenBlocks

FinishReason = Literal["stop", "length", "abort", "error", "rejected"]


@dataclass(slots=True, eq=False)
class Request:
    """A request. A token of `stop_ids` ends it and is not part of the output."""

    id: str
    prompt: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    """Lower goes first; equal ones in order of arrival."""
    salt: str = ""
    lora: str = ""

    tokens: npt.NDArray[np.uint32] = field(init=False)
    """The prompt as an array, converted here so that a step does not wait for it."""

    # Set by the scheduler:
    kv: RequestKv | None = None
    arrival: int = 0
    seed: int = 0
    output: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    chain: TokenBlocks | None = None
    """Identities of its blocks, if there is host memory."""
    offered: int = 0
    """Leading blocks that were offloaded or rejected by the host."""
    load: Copy | None = None
    """Copy from the host that it waits for."""
    holds: list[RegisteredBlocks] = field(default_factory=list)
    """References to its prefix on the device and its loaded blocks, until it is admitted."""

    def __post_init__(self) -> None:
        try:
            self.tokens = np.asarray(self.prompt, np.uint32)
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"request {self.id!r}: prompt must be tokens, 0 to 2**32 - 1 ({error})"
            ) from error

    @property
    def held(self) -> RequestKv:
        """KV of the request, from admission to its end."""
        assert self.kv is not None, f"request {self.id!r} has not been admitted, or has ended"
        return self.kv

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is not computed."""
        return self.kv is not None and self.kv.computed_tokens < self.kv.prefill_target

    def release_holds(self) -> None:
        """Release all references in `holds`."""
        while self.holds:
            self.holds.pop().release()

    def draw(self, ahead: int = 0) -> Draw:
        """Return the draw of its next token, or of the token `ahead` later."""
        if self.sampling.greedy:
            return Draw(self.sampling)
        return Draw(self.sampling, draw_uniform(self.seed, len(self.output) + ahead))


@dataclass(frozen=True, slots=True)
class Output:
    """Output of a step for a request: a token, its end, or both. `error` explains error and rejected."""

    request_id: str
    token: int | None = None
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0

"""A request of the real engine, and what it hears back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from understudy.errors import InvalidArgument
from understudy.qwen3.sampling import GREEDY, Draw, Logprobs, SamplingParams, uniform_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from understudy.kv import RegisteredBlocks, RequestKv
    from understudy.qwen3.host import Copy
    from understudy.tokens import TokenBlocks

FinishReason = Literal["stop", "length", "abort", "error", "rejected"]


@dataclass(slots=True, eq=False)
class Request:
    """Tokens in, tokens out. `stop_ids` end it, and the one that did is not part of the output."""

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
    """The prompt as the device's side wants it, made here: the device does not wait for whoever makes requests."""

    # The scheduler's:
    kv: RequestKv | None = None
    arrival: int = 0
    seed: int = 0
    output: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    chain: TokenBlocks | None = None
    """Names of its blocks; kept while there is host memory to copy them to."""
    offered: int = 0
    """Leading blocks that were offered to the host."""
    load: Copy | None = None
    """What is being brought back for it."""
    holds: list[RegisteredBlocks] = field(default_factory=list)
    """Its prefix on the device and what was brought back behind it, until it is admitted."""

    def __post_init__(self) -> None:
        try:
            self.tokens = np.asarray(self.prompt, np.uint32)
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"request {self.id!r}: prompt must be tokens, 0 to 2**32 - 1 ({error})"
            ) from error

    @property
    def held(self) -> RequestKv:
        """Its KV, which it has from admission to its end."""
        assert self.kv is not None, f"request {self.id!r} has not been admitted, or has ended"
        return self.kv

    @property
    def prefilling(self) -> bool:
        """Whether a part of its prompt is still to be computed."""
        return self.kv is not None and self.kv.computed_tokens < self.kv.prefill_target

    def release_holds(self) -> None:
        """Of what it holds beside its KV."""
        while self.holds:
            self.holds.pop().release()

    def draw(self, ahead: int = 0) -> Draw:
        """For its next token, or one that comes so many later."""
        if self.sampling.greedy:
            return Draw(self.sampling)
        return Draw(self.sampling, uniform_of(self.seed, len(self.output) + ahead))


@dataclass(frozen=True, slots=True)
class Output:
    """What a request hears of one step: a token, or its end, or both. `error` says why for error and rejected."""

    request_id: str
    token: int | None = None
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0

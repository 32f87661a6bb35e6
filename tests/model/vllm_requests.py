"""What the model of vLLM's scheduler is about: a request, a plan of one step, bursts of tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .vllm_blocks import Block


@dataclass(eq=False)
class Request:
    """A request and what the scheduler knows of it."""

    id: str
    index: int
    tokens: list[int]  # prompt, then the outputs received so far
    max_tokens: int
    priority: int
    arrival_time: float
    eos_at: int | None = None
    lora: int = 0
    passed_over: bool = False  # waits for a place for its adapter
    prompt_tokens: int = field(init=False)
    computed: int = 0  # tokens that have, or are being given, KV
    table: list[Block] = field(default_factory=list)
    keyed: int = 0  # leading blocks of the table known to be in the prefix index
    ahead: int = 0  # tokens sampled but not yet received (asynchronous scheduling only)
    status: Literal["new", "running", "preempted", "finished"] = "new"

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def has_ended(self, max_model_len: int) -> bool:
        """Whether the last token received was its last."""
        by_limit = self.outputs() >= self.max_tokens or len(self.tokens) >= max_model_len
        return by_limit or self.outputs() == self.eos_at


@dataclass(eq=False)
class Plan:
    """What one schedule decided."""

    budget: int
    prefill_cap: int | None = None  # of the tokens of one request
    scheduled: dict[Request, int] = field(default_factory=dict)
    samples: set[Request] = field(default_factory=set)  # those of `scheduled` that will yield a token
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    cached: dict[Request, int] = field(default_factory=dict)
    preempted: list[Request] = field(default_factory=list)
    new_blocks: dict[Request, list[Block]] = field(default_factory=dict)  # that this schedule gave
    keyed_before: dict[Request, int] = field(default_factory=dict)  # `keyed` before this step's allocation
    ends: dict[Request, int] = field(default_factory=dict)  # tokens with KV once it is computed


class BurstModel:
    """How many tokens a sampling step yields: one, and draft tokens until the first that is not accepted."""

    def __init__(self, rates: Sequence[float], seed: int) -> None:
        self.rates = rates
        self.state = seed

    def draw(self, remaining: int) -> int:
        tokens = 1
        for rate in self.rates:
            if self._uniform() >= rate:
                break
            tokens += 1
        return min(tokens, remaining)

    def _uniform(self) -> float:  # SplitMix64
        mask = 2**64 - 1
        self.state = (self.state + 0x9E3779B97F4A7C15) & mask
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return ((z ^ (z >> 31)) >> 11) / 2**53

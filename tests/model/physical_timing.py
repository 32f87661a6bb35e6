"""The formula of the physical timing model, written out: slow, obvious, the oracle of the native one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from understudy.timing.coefficients import StepCoefficients


@dataclass(frozen=True)
class Step:
    """Contexts of the requests that decode, and (tokens, history) of every prefill chunk."""

    contexts: list[int] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    other_ranks_tokens: int = 0
    """0: nobody has told."""


def padded(tokens: int, captures: tuple[int, ...]) -> int:
    return min((size for size in captures if size >= tokens), default=tokens)


def window_pairs(tokens: int, history: int, window: int) -> float:
    """Pairs of a chunk's tokens and those that they look at, in a layer with a window."""
    seen = 0.0
    for position in range(history, history + tokens):
        seen += min(position + 0.5, window)
    return seen


def step_ms(c: StepCoefficients, step: Step) -> float:
    tokens = len(step.contexts) + sum(new for new, _ in step.chunks)
    sequences = len(step.contexts) + len(step.chunks)
    of_all_ranks = tokens + step.other_ranks_tokens if step.other_ranks_tokens else tokens * c.ranks
    batch = padded(tokens, c.captures)

    def soft(a: float, b: float) -> float:
        return float((a**c.softness + b**c.softness) ** (1 / c.softness))

    hit = c.local_experts * (1 - (1 - c.expert_share) ** of_all_ranks)
    ms = soft(c.weights_ms, c.token_ms * batch)
    ms += soft(c.expert_ms * hit, c.expert_token_ms * of_all_ranks)
    ms += soft(c.head_ms, c.head_sequence_ms * sequences)
    kv = c.context_ms * sum(step.contexts)
    kv += c.window_context_ms * sum(min(context, c.window) for context in step.contexts)
    ms += kv * (c.mix if step.chunks else 1)
    ms += c.attention_ms * sum(new * (history + new / 2) for new, history in step.chunks)
    ms += c.window_attention_ms * sum(window_pairs(new, history, c.window) for new, history in step.chunks)
    ms += c.comm_ms + c.comm_token_ms * batch + c.comm_rank_token_ms * of_all_ranks
    ms += c.step_ms + c.sequence_ms * sequences + (c.prefill_ms if step.chunks else 0)
    graphs = max(c.captures) if c.floor_above_tokens is None else c.floor_above_tokens
    if step.chunks and tokens > graphs:
        ms = max(ms, c.floor_ms)
    return ms

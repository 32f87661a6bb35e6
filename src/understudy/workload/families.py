"""Workloads that reuse prefixes within seconds: fan-outs of one context, and conversations with short pauses.

A router whose view of the caches is late misses many of their hits.
"""

from __future__ import annotations

import msgspec
import numpy as np

from understudy.checks import positive_number, whole_number
from understudy.errors import ConfigError
from understudy.workload.workload import Workload

_NS_PER_MS = 1_000_000


class FanOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contexts of `context_tokens` tokens, each with `children` questions sent `gap_ms` apart.

    Contexts appear at random times, `context_interval_ms` apart on average; a question adds `question_tokens` (least,
    most) of its own.
    """

    contexts: int = 700
    children: int = 8
    context_tokens: int = 8192
    question_tokens: tuple[int, int] = (64, 512)
    output_tokens: int = 64
    gap_ms: int = 40
    context_interval_ms: float = 1500.0
    trace_block_size: int = 512
    seed: int = 0

    def build(self) -> Workload:
        """Build the workload; equal settings give equal workloads."""
        least, most = _pair("question_tokens", self.question_tokens, 1)
        _check_counts(
            self, "contexts", "children", "context_tokens", "output_tokens", "gap_ms", "trace_block_size"
        )
        random = np.random.default_rng(self.seed)
        begin_ms = _arrivals_ms(random, self, self.contexts, "context_interval_ms")
        shape = (self.contexts, self.children)
        arrival_ms = begin_ms[:, None] + self.gap_ms * np.arange(self.children)
        prompts = self.context_tokens + random.integers(least, most + 1, shape)
        context = np.broadcast_to(np.arange(self.contexts)[:, None], shape)
        return _build(
            arrival_ms, prompts, context, self.context_tokens, self.output_tokens, self.trace_block_size
        )


class QuickTurns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conversations of `turns` requests at fixed times, `think_ms` (least, most) apart, with growing prompts.

    They begin at random times, `session_interval_ms` apart on average, with `first_tokens`, and grow by `turn_tokens`.
    """

    sessions: int = 400
    turns: int = 12
    first_tokens: int = 4096
    turn_tokens: int = 512
    output_tokens: int = 100
    think_ms: tuple[int, int] = (1000, 4000)
    session_interval_ms: float = 1500.0
    trace_block_size: int = 512
    seed: int = 0

    def build(self) -> Workload:
        """Build the workload; equal settings give equal workloads."""
        least, most = _pair("think_ms", self.think_ms, 0)
        _check_counts(
            self, "sessions", "turns", "first_tokens", "turn_tokens", "output_tokens", "trace_block_size"
        )
        random = np.random.default_rng(self.seed)
        begin_ms = _arrivals_ms(random, self, self.sessions, "session_interval_ms")
        shape = (self.sessions, self.turns)
        think_ms = random.integers(least, most + 1, shape)
        think_ms[:, 0] = 0
        arrival_ms = begin_ms[:, None] + np.cumsum(think_ms, axis=1)
        prompts = np.broadcast_to(self.first_tokens + self.turn_tokens * np.arange(self.turns), shape)
        session = np.broadcast_to(np.arange(self.sessions)[:, None], shape)
        longest = int(prompts.max())
        return _build(arrival_ms, prompts, session, longest, self.output_tokens, self.trace_block_size)


def _check_counts(spec: msgspec.Struct, *names: str) -> None:
    for name in names:
        whole_number(name, getattr(spec, name), 1)
    whole_number("seed", getattr(spec, "seed", 0))


def _pair(name: str, value: tuple[int, int], start: int) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise ConfigError(f"{name} must be (least, most), got {value!r}")
    least = whole_number(f"the least of {name}", value[0], start)
    return least, whole_number(f"the most of {name}", value[1], least)


def _arrivals_ms(random: np.random.Generator, spec: msgspec.Struct, count: int, mean: str) -> np.ndarray:
    interval_ms = positive_number(mean, getattr(spec, mean))
    gaps = np.rint(random.exponential(interval_ms, count)).astype(np.int64)
    gaps[0] = 0
    return np.cumsum(gaps)


def _build(
    arrival_ms: np.ndarray,
    prompts: np.ndarray,
    family: np.ndarray,
    shared_tokens: int,
    output_tokens: int,
    block: int,
) -> Workload:
    """Build requests in arrival order; a family shares the full blocks of its first `shared_tokens` tokens."""
    order = np.argsort(arrival_ms, axis=None, kind="stable")
    prompts, family = prompts.reshape(-1)[order], family.reshape(-1)[order]
    blocks = -(-prompts // block)
    offsets = np.concatenate([[0], np.cumsum(blocks)])
    rows = np.repeat(np.arange(len(prompts)), blocks)
    position = np.arange(offsets[-1]) - offsets[rows]
    shared = position < shared_tokens // block
    per_family = shared_tokens // block
    ids = np.where(
        shared,
        family[rows] * per_family + position,
        (family.max() + 1) * per_family + np.cumsum(~shared) - 1,
    )
    return Workload(
        arrival_ns=arrival_ms.reshape(-1)[order] * _NS_PER_MS,
        prompt_tokens=prompts,
        output_tokens=np.full(len(prompts), output_tokens),
        hash_offsets=offsets,
        hash_ids=ids,
        trace_block_size=block,
    )

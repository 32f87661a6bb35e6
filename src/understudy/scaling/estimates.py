"""Latencies that Dynamo's planner estimates from the latest passes of its workers."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.scaling.capabilities import WorkerCapabilities
    from understudy.scaling.metrics import PassSnapshot

MAX_HIT_RATE = 0.95
"""Share of a prompt that a prefix cache may be trusted with: a full hit would hide every queue."""

Work = Literal["prefill", "decode", "both"]
"""What a worker does."""


@dataclass(frozen=True, slots=True)
class PassLoad:
    """Work of one forward pass."""

    prefill_requests: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    decode_kv_tokens: int = 0


class PassTime(Protocol):
    """Duration of one forward pass in ms."""

    def __call__(self, load: PassLoad, /) -> float:
        """Return the duration in ms."""
        ...


@dataclass(frozen=True, slots=True)
class LinearPassTime:
    """A pass whose duration is a sum of shares; 0 when it has nothing to do."""

    base_ms: float
    per_prefill_token_ms: float
    per_decode_request_ms: float
    per_decode_kv_token_ms: float

    def __call__(self, load: PassLoad, /) -> float:
        """Return the duration in ms."""
        if not (
            load.prefill_requests or load.prefill_tokens or load.decode_requests or load.decode_kv_tokens
        ):
            return 0.0
        return (
            self.base_ms
            + self.per_prefill_token_ms * load.prefill_tokens
            + self.per_decode_request_ms * load.decode_requests
            + self.per_decode_kv_token_ms * load.decode_kv_tokens
        )


class RecentMean:
    """Mean of the latest values, from the first that is not zero."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque()
        self._size = max(1, size)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        if not self._values and value <= 0:
            return
        self._values.append(value)
        self._sum += value
        if len(self._values) > self._size:
            self._sum -= self._values.popleft()

    @property
    def value(self) -> float:
        """The mean; 0 without values."""
        return self._sum / len(self._values) if self._values else 0.0


class LatencyEstimates:
    """Time to first token and between tokens of a request that would come to a worker next."""

    def __init__(
        self, work: Work, pass_time: PassTime, capabilities: WorkerCapabilities, samples: int = 64
    ) -> None:
        self._work = work
        self._pass_time = pass_time
        self._chunk = capabilities.max_num_batched_tokens
        self._prompt = RecentMean(samples)
        self._context = RecentMean(samples)
        self._pass_requests = RecentMean(samples)
        self._pass_tokens = RecentMean(samples)

    def observe(self, snapshots: Sequence[PassSnapshot]) -> None:
        """Add one pass of each rank to the means."""
        for seen in snapshots:
            prompts, decoding = seen["num_prefill_requests"], seen["num_decode_requests"]
            self._prompt.add(seen["sum_prefill_tokens"] / prompts if prompts else 0.0)
            if decoding:
                self._context.add(seen["sum_decode_kv_tokens"] / decoding)
        # The peer keeps these two in the order of names: it decides which values a full window forgets first.
        for seen in sorted(snapshots, key=lambda one: (str(one["worker_id"]), one["dp_rank"])):
            self._pass_requests.add(float(seen["num_prefill_requests"]))
            self._pass_tokens.add(float(seen["sum_prefill_tokens"]))

    def first_token_ms(
        self,
        seen: PassSnapshot,
        hit_rate: float | None,
        *,
        queue_scale: float = 1.0,
        decode_scale: float = 1.0,
        with_queued_decode: bool = False,
    ) -> float:
        """Return the time in which the worker would compute its queued prompts and one of mean length."""
        tokens = seen["sum_queued_prefill_tokens"] * queue_scale
        requests = seen["num_queued_prefill"] * queue_scale
        if self._prompt.value > 0:
            tokens += self._prompt.value
            requests += 1.0
        left = _ceil(tokens * (1.0 - clamp_hit_rate(hit_rate)))
        waiting = max(1, _ceil(requests))
        decoding, context = 0, 0
        if self._work == "both":
            extra = with_queued_decode
            decoding = _ceil((seen["num_decode_requests"] + extra * seen["num_queued_decode"]) * decode_scale)
            context = _ceil(
                (seen["sum_decode_kv_tokens"] + extra * seen["sum_queued_decode_kv_tokens"]) * decode_scale
            )
        return sum_of_chunks(
            left, self._chunk, lambda chunk: self._pass_time(PassLoad(waiting, chunk, decoding, context))
        )

    def between_tokens_ms(
        self, seen: PassSnapshot, *, decode_scale: float = 1.0, with_queued_prefill: bool = False
    ) -> float:
        """Return the duration of a pass with all scheduled and queued decodes and one more of mean length."""
        extra = with_queued_prefill
        context = seen["sum_decode_kv_tokens"] + seen["sum_queued_decode_kv_tokens"]
        context += extra * seen["sum_queued_prefill_tokens"]
        requests = (
            seen["num_decode_requests"] + seen["num_queued_decode"] + extra * seen["num_queued_prefill"]
        )
        tokens = context * decode_scale
        count = requests * decode_scale
        if self._context.value > 0:
            tokens += self._context.value
            count += 1.0
        prefill_requests, prefill_tokens = 0, 0
        if self._work == "both":
            prefill_tokens = _ceil(self._pass_tokens.value)
            prefill_requests = max(_ceil(self._pass_requests.value), int(prefill_tokens > 0))
        return self._pass_time(PassLoad(prefill_requests, prefill_tokens, _ceil(count), _ceil(tokens)))


def sum_of_chunks(tokens: int, chunk: int, pass_ms: Callable[[int], float]) -> float:
    """Return the time in ms of passes that compute so many prompt tokens, at most `chunk` in each."""
    whole, rest = divmod(tokens, chunk)
    return (pass_ms(chunk) * whole if whole else 0.0) + (pass_ms(rest) if rest else 0.0)


def clamp_hit_rate(hit_rate: float | None) -> float:
    """Return the share of prompts that is taken as cached."""
    if hit_rate is None or not math.isfinite(hit_rate):
        return 0.0
    return min(MAX_HIT_RATE, max(0.0, hit_rate))


def _ceil(value: float) -> int:
    return max(0, math.ceil(value))

"""Who computes a step: the small surface that the scheduler sees, and the one that computes here, on one device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from understudy.qwen3.batch import Batch, Chunk, Decode
from understudy.qwen3.forward import Reduce, alone, forward
from understudy.qwen3.sampling import Draw, Logprobs, Sampled, sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.qwen3.backend import Backend
    from understudy.qwen3.buffer import KvBuffer
    from understudy.qwen3.graphs import DecodeGraphs
    from understudy.qwen3.weights import Weights


@dataclass(slots=True)
class Step:
    """What to compute: chunks, then decodes, and a draw for every row (of an unfinished prompt it is thrown away)."""

    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.chunks) + len(self.decodes)


class Computed(NamedTuple):
    """A token for every chunk, then for every decode; and their log probabilities where one was asked for."""

    tokens: list[int]
    logprobs: list[Logprobs | None]


class Executor(Protocol):
    """Computes steps in the order in which they are begun. It knows views, never requests."""

    def begin(self, step: Step) -> None:
        """Start to compute. At most one step is under way."""

    def finish(self) -> Computed:
        """Wait for the step that was begun. Raises what went wrong with it; then nothing of it counts."""

    def close(self) -> None:
        """Give the device back. Idempotent."""


class TorchExecutor:
    """One rank: weights, buffer and backend on one device. With `graphs`, steps that only decode are replayed."""

    def __init__(
        self,
        weights: Weights,
        buffer: KvBuffer,
        backend: Backend,
        *,
        reduce: Reduce = alone,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.weights = weights
        self.buffer = buffer
        self.backend = backend
        self._reduce = reduce
        self._graphs = graphs
        self._running: tuple[Step, Sampled] | None = None

    @torch.inference_mode()
    def begin(self, step: Step) -> None:
        greedy = None
        if self._graphs is not None and not step.chunks and self._graphs.fits(len(step.decodes)):
            logits, greedy = self._graphs.replay(step.decodes)
        else:
            batch = Batch.build(step.chunks, step.decodes, self.buffer.pages.device)
            logits = forward(self.weights, batch, self.buffer, self.backend, self._reduce)
        self._running = (step, sample(logits, step.draws, greedy))

    def finish(self) -> Computed:
        assert self._running is not None, "no step was begun"
        (step, sampled), self._running = self._running, None
        return collect(step.draws, sampled)

    def close(self) -> None:
        self._running = None


def collect(draws: Sequence[Draw], sampled: Sampled) -> Computed:
    """To the host: one copy of tokens, and of log probabilities only where a row wants them."""
    tokens: list[int] = sampled.tokens.tolist()
    logprobs: list[Logprobs | None] = [None] * len(draws)
    if sampled.chosen is not None and sampled.top_tokens is not None and sampled.top_values is not None:
        chosen, names, values = (
            sampled.chosen.tolist(),
            sampled.top_tokens.tolist(),
            sampled.top_values.tolist(),
        )
        for row, draw in enumerate(draws):
            if (wanted := draw.params.logprobs) is not None:
                top = tuple(zip(names[row][:wanted], values[row][:wanted], strict=True))
                logprobs[row] = Logprobs(chosen[row], top)
    return Computed(tokens, logprobs)

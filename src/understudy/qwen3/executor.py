"""Executors, which compute steps: their interface, and one for a single device in this process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from understudy.kv import KvView
from understudy.qwen3.batch import Batch, Chunk, Decode
from understudy.qwen3.forward import Reduce, forward, no_reduce
from understudy.qwen3.sampling import Draw, Logprobs, Sampled, sample
from understudy.timing.recorded.shapes import is_short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.qwen3.backend import Backend
    from understudy.qwen3.buffer import KvBuffer
    from understudy.qwen3.graphs import StepGraphs
    from understudy.qwen3.weights import Weights
    from understudy.timing.recorded.shapes import Shape


@dataclass(slots=True)
class Step:
    """A step: chunks, then decodes, and a draw for every row (unused for an unfinished prompt)."""

    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    ahead: bool = False
    """Whether it was predicted during the previous step, with only its tokens missing."""

    def __len__(self) -> int:
        return len(self.chunks) + len(self.decodes)


class Computed(NamedTuple):
    """A token per chunk, then per decode, with log probabilities where requested."""

    tokens: list[int]
    logprobs: list[Logprobs | None]


class Executor(Protocol):
    """Compute steps in the order in which they begin, from views without requests."""

    def prepare(self, step: Step) -> None:
        """Prepare a step that may begin next; its rows take the tokens of the current step."""

    def begin(self, step: Step) -> None:
        """Start computing a step. At most one is in progress."""

    def finish(self) -> Computed:
        """Wait for the current step and return its results. Raises its error; the step then has no effect."""

    def close(self) -> None:
        """Release the device. Idempotent."""


class TorchExecutor:
    """One rank: weights, buffer and backend on one device. With `graphs`, captured steps are replayed."""

    def __init__(
        self,
        weights: Weights,
        buffer: KvBuffer,
        backend: Backend,
        *,
        reduce: Reduce = no_reduce,
        graphs: StepGraphs | None = None,
    ) -> None:
        self.weights = weights
        self.buffer = buffer
        self.backend = backend
        self._reduce = reduce
        self._graphs = graphs
        self._running: tuple[Step, Sampled] | None = None
        self._prepared: tuple[Step, Shape] | None = None
        self._delivery = Delivery() if buffer.pages.device.type == "cuda" else None

    @torch.inference_mode()
    def prepare(self, step: Step) -> None:
        """Enqueue the step's metadata on the device after the current step, whose tokens it takes."""
        if self._graphs is None or self._running is None:
            return
        if (shape := self._graphs.shape_of((), step.decodes)) is not None:
            self._graphs.prepare(shape, step.decodes, self._running[1].tokens)
            self._prepared = (step, shape)

    @torch.inference_mode()
    def begin(self, step: Step) -> None:
        prepared, self._prepared = self._prepared, None
        if self._graphs is not None and prepared is not None and prepared[0] is step:
            logits, greedy = self._graphs.replay_prepared(prepared[1], len(step))
            self._send_sampled(step, sample(logits, step.draws, greedy))
            return
        replayed = None if self._graphs is None else self._replay(self._graphs, step)
        if replayed is not None:
            logits, greedy = replayed
            self._send_sampled(step, sample(logits, step.draws, greedy))
            return
        batch = Batch.build(step.chunks, step.decodes, self.buffer.pages.device)
        logits = forward(self.weights, batch, self.buffer, self.backend, self._reduce)
        self._send_sampled(step, sample(logits, step.draws))

    def finish(self) -> Computed:
        assert self._running is not None, "no step is in progress"
        (step, sampled), self._running = self._running, None
        tokens = sampled.tokens.tolist() if self._delivery is None else self._delivery.receive(len(step))
        return collect_outputs(step.draws, sampled, tokens)

    def close(self) -> None:
        self._running = self._prepared = None

    def _send_sampled(self, step: Step, sampled: Sampled) -> None:
        if self._delivery is not None:
            self._delivery.send(sampled.tokens)
        self._running = (step, sampled)

    def _replay(self, graphs: StepGraphs, step: Step) -> tuple[torch.Tensor, torch.Tensor] | None:
        if (rows := convert_to_decodes(step)) is not None and (
            shape := graphs.shape_of((), rows.decodes)
        ) is not None:
            return graphs.replay(shape, (), rows.decodes, rows.wanted)
        if (shape := graphs.shape_of(step.chunks, step.decodes)) is not None:
            return graphs.replay(shape, step.chunks, step.decodes)
        return None


class Rows(NamedTuple):
    """A step with only decodes, and the rows whose outputs are wanted."""

    decodes: list[Decode]
    wanted: list[int]


def convert_to_decodes(step: Step) -> Rows | None:
    """Convert short chunks to one decode per token on the same pages; None without chunks or with long ones.

    A layer writes all rows before it reads any, so each token sees those before it.
    """
    if not step.chunks or not is_short(sum(len(c.tokens) for c in step.chunks), len(step.decodes)):
        return None
    decodes: list[Decode] = []
    wanted: list[int] = []
    for tokens, view in step.chunks:
        start = view.seq_len - len(tokens)
        for offset, token in enumerate(tokens.tolist()):
            length = start + offset + 1
            pages = view.page_ids[: -(-length // view.page_size)]
            decodes.append(Decode(token, KvView.of_step(pages, length, view.page_size)))
        wanted.append(len(decodes) - 1)
    wanted += range(len(decodes), len(decodes) + len(step.decodes))
    return Rows(decodes + step.decodes, wanted)


class Delivery:
    """Transfer of sampled tokens to the host by a kernel, because a copy would queue behind offloaded pages."""

    def __init__(self) -> None:
        from understudy.qwen3.kernels.fetch import fetch

        self._fetch = fetch
        self._host_tokens = torch.empty(256, dtype=torch.int64, pin_memory=True)
        self._sent = torch.cuda.Event()

    def send(self, tokens: torch.Tensor) -> None:
        """Enqueue the transfer after the sampling kernels. Earlier tokens must have been received."""
        if len(tokens) > len(self._host_tokens):
            self._host_tokens = torch.empty(len(tokens), dtype=torch.int64, pin_memory=True)
        self._fetch(tokens, self._host_tokens, len(tokens))
        self._sent.record()

    def receive(self, count: int) -> list[int]:
        """Wait for the last transfer and return its tokens."""
        self._sent.synchronize()
        tokens: list[int] = self._host_tokens[:count].tolist()
        return tokens


def collect_outputs(draws: Sequence[Draw], sampled: Sampled, tokens: list[int]) -> Computed:
    """Collect tokens and, for rows that want them, log probabilities on the host."""
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

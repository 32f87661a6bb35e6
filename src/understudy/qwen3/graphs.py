"""Steps as captured CUDA graphs: one launch per step, independent of its requests and their lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from understudy.kv import KvCacheManager
from understudy.qwen3.arrays import StepArrays
from understudy.qwen3.batch import are_uneven
from understudy.qwen3.forward import Reduce, forward
from understudy.timing.recorded.shapes import Shape, shape_of, shapes_up_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.qwen3.backend import Backend
    from understudy.qwen3.batch import Batch, Chunk, Decode
    from understudy.qwen3.buffer import KvBuffer
    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.options import EngineOptions
    from understudy.qwen3.weights import Weights


class Graph(Protocol):
    """A captured graph."""

    def replay(self) -> None:
        """Compute the graph with the current contents of its arrays."""


class StepGraphs:
    """Graphs of all step shapes, captured at start-up."""

    _pool: Any = None

    def __init__(
        self,
        weights: Weights,
        buffer: KvBuffer,
        backend: Backend,
        reduce: Reduce,
        *,
        padding_block: int,
        max_decodes: int,
        max_tokens: int,
        max_pages: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        device = buffer.pages.device
        shapes = shapes_up_to(max_tokens, max_decodes)
        self._arrays = StepArrays(shapes, padding_block=padding_block, max_pages=max_pages, device=device)
        rows = max(shape.slots + shape.decode_rows for shape in shapes)
        # All graphs share these outputs: each is read before the next is replayed.
        self._logits = torch.empty(rows, weights.head.shape[0], dtype=weights.head.dtype, device=device)
        self._greedy = torch.empty(rows, dtype=torch.int64, device=device)
        self._graphs: dict[Shape, Graph] = {}
        for number, shape in enumerate(shapes):  # the largest first: the others fit into its memory
            batch = self._arrays.batch(shape)
            self._arrays.fill(shape, (), ())

            def compute(batch: Batch = batch) -> None:
                logits = forward(weights, batch, buffer, backend, reduce)
                self._logits[: len(logits)] = logits
                backend.argmax(logits, self._greedy[: len(logits)])

            self._graphs[shape] = self._capture(compute)
            if progress is not None:
                progress(number + 1, len(shapes))

    @classmethod
    @torch.inference_mode()
    def build(
        cls,
        config: Qwen3Config,
        options: EngineOptions,
        weights: Weights,
        buffer: KvBuffer,
        backend: Backend,
        reduce: Reduce,
        progress: Callable[[int, int], None] | None = None,
    ) -> StepGraphs:
        """Capture all shapes within an engine's limits. The padding block depends only on the size."""
        with KvCacheManager(buffer.num_blocks, buffer.layout) as manager:
            padding_block = manager.padding_block
        return cls(
            weights,
            buffer,
            backend,
            reduce,
            padding_block=padding_block,
            max_decodes=options.max_num_seqs,
            max_tokens=options.max_batched_tokens,
            max_pages=-(-config.max_positions // options.page_size),
            progress=progress,
        )

    def shape_of(self, chunks: Sequence[Chunk], decodes: Sequence[Decode]) -> Shape | None:
        """Return the shape that such a step is padded to, or None when it was not captured."""
        tokens = sum(len(chunk.tokens) for chunk in chunks)
        shape = shape_of(tokens, len(chunks), len(decodes), uneven=not chunks and are_uneven(decodes))
        return shape if shape in self._graphs else None

    @torch.inference_mode()
    def replay(
        self,
        shape: Shape,
        chunks: Sequence[Chunk],
        decodes: Sequence[Decode],
        wanted: Sequence[int] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and most likely tokens after chunks, then decodes; `wanted` selects rows of decodes.

        The next replay overwrites both.
        """
        self._arrays.fill(shape, chunks, decodes, wanted)
        if wanted is None:
            return self.replay_prepared(shape, len(chunks) + len(decodes))
        self._graphs[shape].replay()
        rows = self._arrays.logit_rows[: len(wanted)]
        return self._logits[rows], self._greedy[rows]

    def prepare(self, shape: Shape, decodes: Sequence[Decode], tokens: torch.Tensor) -> None:
        """Write metadata of decodes whose input tokens are still being computed; one stream keeps the order."""
        self._arrays.fill(shape, (), decodes)
        self._arrays.set_decode_tokens(tokens)

    @torch.inference_mode()
    def replay_prepared(self, shape: Shape, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Replay the step whose metadata was written last; returns as `replay`."""
        self._graphs[shape].replay()
        return self._logits[:count], self._greedy[:count]

    def graph(self, shape: Shape) -> Graph:
        """Return the graph of a shape, for benchmarks that replay it with the current metadata."""
        return self._graphs[shape]

    def _capture(self, compute: Callable[[], None]) -> Graph:
        compute()  # compiles kernels outside the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads (of a group of ranks) may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        self._pool = graph.pool()
        return graph

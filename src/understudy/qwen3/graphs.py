"""Steps as captured CUDA graphs: one launch a step, whatever its requests and their lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from understudy.qwen3.batch import Batch, Flat, are_uneven
from understudy.qwen3.forward import Reduce, forward
from understudy.qwen3.shapes import Shape, shape_of, shapes_up_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from understudy.qwen3.backend import Backend
    from understudy.qwen3.batch import Chunk, Decode
    from understudy.qwen3.buffer import KvBuffer
    from understudy.qwen3.weights import Weights


class StepArrays:
    """Metadata of a captured step: arrays on the host and one on the device, whose addresses never change.

    On the host there are two in turn: a step is described while the device may still read what describes the last.

    A step is padded to its shape. Padded rows feed token 0 at position 0 of the padding block, padded tiles compute
    nothing, and nobody reads what comes of either.
    """

    def __init__(
        self, shapes: Sequence[Shape], *, padding_block: int, max_pages: int, device: torch.device
    ) -> None:
        self._padding_block = padding_block
        tokens, slots = max(s.tokens for s in shapes), max(s.slots for s in shapes)
        requests = slots + max(s.decode_rows for s in shapes) + 1
        tiles = max(s.tiles for s in shapes)
        sizes = {
            **dict.fromkeys(("tokens", "positions", "owners"), tokens),
            "seq_lens": requests,
            "page_indptr": requests + 1,
            "chunk_indptr": slots + 1,
            "tile_owners": tiles,
            "tile_starts": tiles,
            "logit_rows": requests,
            "page_ids": requests * max_pages,  # requests share pages: as many as all contexts have
        }
        self._pages_at = sum(sizes.values()) - sizes["page_ids"]
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(sum(sizes.values()), dtype=torch.int32, pin_memory=pinned) for _ in "ab"]
        self._turn = 0
        self._device = torch.zeros_like(self._hosts[0], device=device, pin_memory=False)
        parts = zip(sizes, self._device.split(list(sizes.values())), strict=True)
        self._there: dict[str, torch.Tensor] = dict(parts)
        self.logit_rows = self._there["logit_rows"]
        places = np.cumsum([0, *sizes.values()])
        self._heres: list[dict[str, npt.NDArray[np.int32]]] = [
            {
                name: host.numpy()[at : at + size]
                for (name, size), at in zip(sizes.items(), places, strict=False)
            }
            for host in self._hosts
        ]

    def batch(self, shape: Shape) -> Batch:
        """The arrays of a shape, as kernels read them."""
        there, slots = self._there, shape.slots
        requests = slots + shape.decode_rows
        return Batch(
            tokens=there["tokens"][: shape.tokens],
            positions=there["positions"][: shape.tokens],
            owners=there["owners"][: shape.tokens],
            page_ids=there["page_ids"],
            page_indptr=there["page_indptr"][: requests + 1],
            seq_lens=there["seq_lens"][:requests],
            chunk_indptr=there["chunk_indptr"][: slots + 1],
            tile_owners=there["tile_owners"][: shape.tiles],
            tile_starts=there["tile_starts"][: shape.tiles],
            logit_rows=there["logit_rows"][:requests],
            tile_rows=shape.tile_rows,
            num_chunks=slots,
            chunk_tokens=shape.chunk_rows,
            num_decodes=shape.decode_rows,
            histories=(),
            uneven=shape.uneven,
        )

    def fill(
        self,
        shape: Shape,
        chunks: Sequence[Chunk],
        decodes: Sequence[Decode],
        wanted: Sequence[int] | None = None,
    ) -> None:
        """Describe a step, and send it to the device at once. A step of nothing is all padding.

        `wanted` are the rows of `logit_rows` where not all requests' last ones are.
        """
        self._turn = 1 - self._turn
        here, slots, at = self._heres[self._turn], shape.slots, shape.chunk_rows
        first, padding = len(chunks), slots + shape.decode_rows
        end, last = at + len(decodes), slots + len(decodes)
        flat = Flat.of(chunks, decodes) if chunks or decodes else None
        fed = 0 if flat is None else int(flat.chunk_indptr[-1])
        for name, blank in (("tokens", 0), ("positions", 0), ("owners", padding)):
            rows = here[name]
            rows[fed:at] = blank
            rows[end : shape.tokens] = blank
            if flat is not None:
                of = getattr(flat, name)
                rows[:fed] = of[:fed]
                rows[at:end] = of[fed:] + (slots - first if name == "owners" else 0)
        lengths, counts = here["seq_lens"], np.ones(padding + 1, np.int32)
        lengths[: padding + 1] = 1
        lengths[first:slots] = counts[first:slots] = 0
        used = 0
        if flat is not None:
            lengths[:first], lengths[slots:last] = flat.seq_lens[:first], flat.seq_lens[first:]
            pages = np.diff(flat.page_indptr)
            counts[:first], counts[slots:last] = pages[:first], pages[first:]
            used = len(flat.page_ids)
            here["page_ids"][:used] = flat.page_ids
            here["logit_rows"][: first + len(decodes)] = flat.ends
            here["logit_rows"][first : first + len(decodes)] += at - fed
        here["logit_rows"][first + len(decodes) : padding] = 0
        if wanted is not None:
            here["logit_rows"][: len(wanted)] = wanted
        padded = padding + 1 - last
        here["page_ids"][used : used + padded] = self._padding_block
        here["page_indptr"][0] = 0
        np.cumsum(counts, out=here["page_indptr"][1 : padding + 2])
        if slots:
            here["tile_owners"][: shape.tiles] = -1
            here["chunk_indptr"][: slots + 1] = fed
            if flat is not None:
                here["chunk_indptr"][: first + 1] = flat.chunk_indptr
                owners, starts = flat.tiles(shape.tile_rows)
                here["tile_owners"][: len(owners)], here["tile_starts"][: len(starts)] = owners, starts
        self._send(self._hosts[self._turn], self._pages_at + used + padded)

    def feed(self, tokens: torch.Tensor) -> None:
        """Tokens that are still being computed, for as many decodes without prompts."""
        self._there["tokens"][: len(tokens)].copy_(tokens)

    def _send(self, host: torch.Tensor, until: int) -> None:
        if self._device.device.type == "cuda":
            from understudy.qwen3.kernels.fetch import fetch

            fetch(host, self._device, until)
        else:
            self._device[:until].copy_(host[:until])


class Graph(Protocol):
    """What was captured."""

    def replay(self) -> None:
        """Compute it once more, with what its arrays hold by then."""


class StepGraphs:
    """Captured at start-up, replayed for ever."""

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
        # One place for what all of them compute: each is read before the next is replayed.
        self._logits = torch.empty(rows, weights.head.shape[0], dtype=weights.head.dtype, device=device)
        self._greedy = torch.empty(rows, dtype=torch.int64, device=device)
        self._graphs: dict[Shape, Graph] = {}
        for number, shape in enumerate(shapes):  # the largest first: the rest fits into its memory
            batch = self._arrays.batch(shape)
            self._arrays.fill(shape, (), ())

            def compute(batch: Batch = batch) -> None:
                logits = forward(weights, batch, buffer, backend, reduce)
                self._logits[: len(logits)] = logits
                torch.argmax(logits, -1, out=self._greedy[: len(logits)])

            self._graphs[shape] = self._capture(compute)
            if progress is not None:
                progress(number + 1, len(shapes))

    def shape_of(self, chunks: Sequence[Chunk], decodes: Sequence[Decode]) -> Shape | None:
        """What such a step is padded to, or None when it was not captured."""
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
        """Logits and likeliest tokens behind chunks, then decodes; of decodes alone, those that are `wanted`.

        Both are overwritten by the next replay.
        """
        self._arrays.fill(shape, chunks, decodes, wanted)
        if wanted is None:
            return self.replay_prepared(shape, len(chunks) + len(decodes))
        self._graphs[shape].replay()
        rows = self._arrays.logit_rows[: len(wanted)]
        return self._logits[rows], self._greedy[rows]

    def prepare(self, shape: Shape, decodes: Sequence[Decode], tokens: torch.Tensor) -> None:
        """Describe decodes that feed what is being computed. Behind that, for all of it runs on one stream."""
        self._arrays.fill(shape, (), decodes)
        self._arrays.feed(tokens)

    @torch.inference_mode()
    def replay_prepared(self, shape: Shape, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As `replay`, of the step that was described last."""
        self._graphs[shape].replay()
        return self._logits[:count], self._greedy[:count]

    def graph(self, shape: Shape) -> Graph:
        """To be replayed once more with the metadata that are there, by a benchmark."""
        return self._graphs[shape]

    def _capture(self, compute: Callable[[], None]) -> Graph:
        compute()  # compiles kernels outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            compute()
        self._pool = graph.pool()
        return graph

"""Decode steps as captured CUDA graphs: one launch a step, whatever the lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from understudy.qwen3.batch import Batch, Decode
from understudy.qwen3.forward import Reduce, forward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.qwen3.backend import Backend
    from understudy.qwen3.buffer import KvBuffer
    from understudy.qwen3.weights import Weights

BUCKETS = (1, 2, 4, 8, *range(16, 257, 16))
"""Batch sizes that are captured; a smaller batch is padded to the next."""


class DecodeGraphs:
    """Captured at start-up, replayed for ever. Metadata live in arrays whose addresses never change.

    Padded rows feed token 0 at position 0 of the padding block, and nobody reads what they compute.
    """

    def __init__(
        self,
        weights: Weights,
        buffer: KvBuffer,
        backend: Backend,
        reduce: Reduce,
        *,
        padding_block: int,
        max_batch: int,
        max_pages: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._padding_block = padding_block
        self._page_size = buffer.layout.page_size
        self.buckets = tuple(size for size in BUCKETS if size <= max_batch) or (1,)
        self._most = self.buckets[-1]
        # Tokens, positions, lengths, indptr, then pages: requests share pages, so as many as all contexts have.
        self._heads = np.cumsum([0, self._most, self._most, self._most, self._most + 1])
        size = int(self._heads[-1]) + self._most * max_pages
        device = buffer.pages.device
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._mirror = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._owners = torch.arange(self._most, dtype=torch.int32, device=device)
        self._no_chunks = torch.zeros(1, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._fill([], self._most)
        pool = None
        for number, bucket in enumerate(
            reversed(self.buckets)
        ):  # the largest first: the rest fits into its memory
            batch = self._batch(bucket)
            logits = forward(
                weights, batch, buffer, backend, reduce
            )  # compiles kernels outside of the capture
            logits.argmax(-1)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                logits = forward(weights, batch, buffer, backend, reduce)
                greedy = logits.argmax(-1)
            pool = graph.pool()
            self._graphs[bucket] = (graph, logits, greedy)
            if progress is not None:
                progress(number + 1, len(self.buckets))

    def fits(self, count: int) -> bool:
        """Whether a batch of so many decodes has a graph."""
        return 0 < count <= self._most

    @torch.inference_mode()
    def replay(self, decodes: Sequence[Decode]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and likeliest tokens of the batch. Both are overwritten by the next replay."""
        count = len(decodes)
        bucket = next(size for size in self.buckets if size >= count)
        self._fill(decodes, bucket)
        graph, logits, greedy = self._graphs[bucket]
        graph.replay()
        return logits[:count], greedy[:count]

    def _fill(self, decodes: Sequence[Decode], bucket: int) -> None:
        """Metadata to the device in one copy."""
        count, most = len(decodes), self._most
        tokens, positions, lengths, indptr, pages = (int(at) for at in self._heads)
        mirror = self._mirror
        mirror[tokens : tokens + bucket] = 0
        mirror[positions : positions + bucket] = 0
        mirror[lengths : lengths + bucket] = 1
        used = 0
        if count:
            seq_lens = np.fromiter((decode.view.seq_len for decode in decodes), np.int32, count)
            mirror[tokens : tokens + count] = [decode.token for decode in decodes]
            mirror[positions : positions + count] = seq_lens - 1
            mirror[lengths : lengths + count] = seq_lens
            ids = np.concatenate([decode.view.page_ids for decode in decodes])
            used = len(ids)
            mirror[pages : pages + used] = ids
            np.cumsum(-(-seq_lens // self._page_size), out=mirror[indptr + 1 : indptr + 1 + count])
        padded = bucket - count
        mirror[indptr + 1 + count : indptr + 1 + bucket] = np.arange(used + 1, used + 1 + padded)
        mirror[pages + used : pages + used + padded] = self._padding_block
        end = pages + used + padded
        assert most >= bucket
        self._device[:end].copy_(self._host[:end], non_blocking=True)

    def _batch(self, bucket: int) -> Batch:
        tokens, positions, lengths, indptr, pages = (int(at) for at in self._heads)
        return Batch(
            tokens=self._device[tokens : tokens + bucket],
            positions=self._device[positions : positions + bucket],
            owners=self._owners[:bucket],
            page_ids=self._device[pages:],
            page_indptr=self._device[indptr : indptr + bucket + 1],
            seq_lens=self._device[lengths : lengths + bucket],
            chunk_indptr=self._no_chunks,
            logit_rows=self._owners[:bucket],
            num_chunks=0,
            chunk_tokens=0,
            num_decodes=bucket,
            longest_chunk=0,
            histories=(),
        )

"""Number of KV pages that fit into a device's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from understudy.errors import ConfigError
from understudy.kv import KvView
from understudy.qwen3.batch import Chunk, Decode
from understudy.qwen3.buffer import KvBuffer
from understudy.qwen3.executor import Step, TorchExecutor
from understudy.qwen3.sampling import Draw, SamplingParams

if TYPE_CHECKING:
    from understudy.qwen3.backend import Backend
    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.options import EngineOptions
    from understudy.qwen3.weights import Weights


def count_blocks_that_fit(
    config: Qwen3Config, weights: Weights, backend: Backend, options: EngineOptions, device: torch.device
) -> int:
    """Count the blocks that fit into one rank's device next to a worst-case step; `config` is the rank's shape."""
    if device.type != "cuda":
        raise ConfigError("num_blocks is needed on a CPU, whose memory is not measured; give it")
    layout = config.layout(options.page_size)
    pages = -(-options.max_batched_tokens // options.page_size)
    buffer = KvBuffer(pages + options.max_num_seqs + 1, layout, getattr(torch, config.dtype), device)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    executor = TorchExecutor(weights, buffer, backend)
    executor.begin(build_worst_step(options, config.max_positions))
    executor.finish()
    torch.cuda.synchronize(device)
    kv_bytes = buffer.pages.nbytes
    peak = torch.cuda.max_memory_reserved(device) - kv_bytes
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    del buffer, executor
    torch.cuda.empty_cache()
    room = int(total * options.memory_utilization) - peak - others - (2 << 30 if options.cuda_graphs else 0)
    return layout.block_budget(max(0, room), 1.0)


def build_worst_step(options: EngineOptions, max_positions: int) -> Step:
    """Build a step with the most decodes, prompts that fill the budget, and the most expensive sampling."""
    size, decodes = options.page_size, options.max_num_seqs - 1
    chunks = build_dry_chunks(options.max_batched_tokens - decodes, max_positions, size)
    page = -(-options.max_batched_tokens // size)
    rows = [Decode(0, KvView(np.array([page + row], np.int32), 1, size)) for row in range(decodes)]
    draw = Draw(SamplingParams(top_p=0.9, logprobs=8), 0.5)
    return Step(chunks, rows, [draw] * (len(chunks) + decodes))


def build_dry_chunks(
    tokens: int, max_positions: int, page_size: int, *, page: int | None = None, history: bool = False
) -> list[Chunk]:
    """Build prompts with that many tokens in total, none longer than the model's positions.

    They use the first pages, or only `page`. With `history`, half of each prompt is already computed.
    """
    chunks = []
    for start in range(0, tokens, max_positions):
        length = min(max_positions, tokens - start)
        count = -(-length // page_size)
        first = start // page_size
        pages = np.arange(first, first + count) if page is None else np.full(count, page)
        new = max(1, length // 2) if history else length
        chunks.append(Chunk(np.zeros(new, np.int32), KvView(pages.astype(np.int32), length, page_size)))
    return chunks

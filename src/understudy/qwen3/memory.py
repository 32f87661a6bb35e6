"""How many pages of KV a device has room for."""

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
    from understudy.qwen3.build import EngineOptions
    from understudy.qwen3.config import Qwen3Config
    from understudy.qwen3.weights import Weights


def blocks_that_fit(
    config: Qwen3Config, weights: Weights, backend: Backend, options: EngineOptions, device: torch.device
) -> int:
    """What a dry step of the worst composition leaves of the memory of one rank's device, whose shape `config` is."""
    if device.type != "cuda":
        raise ConfigError("num_blocks is needed where device memory cannot be asked: on a CPU")
    layout = config.layout(options.page_size)
    pages = -(-options.max_batched_tokens // options.page_size)
    buffer = KvBuffer(pages + options.max_num_seqs + 1, layout, getattr(torch, config.dtype), device)
    decodes = [
        Decode(0, KvView(np.array([pages + row], np.int32), 1, options.page_size))
        for row in range(options.max_num_seqs - 1)
    ]
    chunk = options.max_batched_tokens - len(decodes)
    view = KvView(np.arange(-(-chunk // options.page_size), dtype=np.int32), chunk, options.page_size)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    executor = TorchExecutor(weights, buffer, backend)
    sampling = Draw(SamplingParams(top_p=0.9, logprobs=8), 0.5)
    executor.begin(Step([Chunk(np.zeros(chunk, np.int32), view)], decodes, [sampling] * (len(decodes) + 1)))
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

"""Build an engine from a model's name or folder: weights, memory for KV, graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from understudy.errors import ConfigError
from understudy.kv import KvCacheManager, KvView
from understudy.qwen3.backends import make_backend
from understudy.qwen3.batch import Decode
from understudy.qwen3.buffer import KvBuffer
from understudy.qwen3.config import Qwen3Config, find_config
from understudy.qwen3.engine import Engine
from understudy.qwen3.executor import Executor, Step, TorchExecutor
from understudy.qwen3.forward import no_reduce
from understudy.qwen3.graphs import StepGraphs
from understudy.qwen3.host import HostTier
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.memory import build_dry_chunks, count_blocks_that_fit
from understudy.qwen3.options import EngineOptions
from understudy.qwen3.ranks import RankedExecutor, RankSettings
from understudy.qwen3.sampling import Draw
from understudy.qwen3.scheduler import Scheduler
from understudy.qwen3.weights import Weights, load_weights, random_weights
from understudy.timing.recorded.shapes import CHUNK_ROWS

Progress = Callable[[str, int, int], None]
"""Callback with the current activity, the number of finished parts, and the number of all parts."""


def build_engine(
    model: str, options: EngineOptions | None = None, progress: Progress | None = None
) -> Engine:
    """Build an engine that is ready to step. ConfigError names contradicting options."""
    options = EngineOptions() if options is None else options
    config = find_config(model)
    if options.dtype is not None:
        config = replace(config, dtype=options.dtype)
    if options.max_model_len is not None:
        if options.max_model_len > config.max_positions:
            raise ConfigError(
                f"max_model_len={options.max_model_len} exceeds max_position_embeddings={config.max_positions}"
            )
        config = replace(config, max_positions=options.max_model_len)
    device = find_device(options.device)
    limits = SchedulerConfig(options.max_batched_tokens, options.max_num_seqs, config.max_positions)
    if options.tensor_parallel_size != 1:
        return _build_ranked(model, config, options, device)
    backend = make_backend(config, device, options.backend)
    weights = _load_weights(model, config, options, device, progress)
    layout = config.layout(options.page_size)
    blocks = options.num_blocks or count_blocks_that_fit(config, weights, backend, options, device)
    manager = KvCacheManager(blocks, layout, prefix_caching=options.prefix_caching, events=options.events)
    buffer = KvBuffer(blocks, layout, getattr(torch, config.dtype), device)
    graphs = None
    if device.type == "cuda" and options.cuda_graphs:
        report = None if progress is None else lambda done, of: progress("capturing graphs", done, of)
        graphs = StepGraphs.build(config, options, weights, buffer, backend, no_reduce, report)
    executor = TorchExecutor(weights, buffer, backend, graphs=graphs)
    if device.type == "cuda":
        captured = CHUNK_ROWS[-1] if graphs else 0
        _warm_up(executor, options, config.max_positions, manager.padding_block, captured, progress)
    scheduler = Scheduler(
        manager,
        limits,
        seed=options.seed,
        host=None if options.tiers is None else HostTier.from_config(options.tiers, manager, buffer),
    )
    return Engine(scheduler, executor)


def find_device(name: str | None) -> torch.device:
    """Return the named device, by default CUDA if available. ConfigError if it does not exist."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ConfigError(f"device {name!r} is not known; choose cuda or cpu") from None
    if device.type not in ("cuda", "cpu"):
        raise ConfigError(f"device {name!r} is not supported; choose cuda or cpu")
    if name is not None and device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} does not exist (PyTorch sees {torch.cuda.device_count()} CUDA devices); choose cpu"
        )
    return device


def _build_ranked(model: str, config: Qwen3Config, options: EngineOptions, device: torch.device) -> Engine:
    """Build an engine with one manager here and a process for every rank."""
    ranks = options.tensor_parallel_size
    if ranks < 1:
        raise ConfigError(f"tensor_parallel_size must be at least 1, got {ranks}")
    if options.tiers is not None:
        raise ConfigError("tiers need tensor_parallel_size=1; pages of several ranks are not copied yet")
    if device.type == "cuda" and ranks > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size={ranks} needs as many CUDA devices; there are {torch.cuda.device_count()}"
        )
    executor = RankedExecutor(
        RankSettings(
            config,
            ranks,
            replace(options, device=device.type, tiers=None),
            folder=None if options.random_weights is not None else _check_folder(model),
        )
    )
    manager = KvCacheManager(
        executor.num_blocks,
        config.layout(options.page_size),
        prefix_caching=options.prefix_caching,
        events=options.events,
    )
    limits = SchedulerConfig(options.max_batched_tokens, options.max_num_seqs, config.max_positions)
    return Engine(Scheduler(manager, limits, seed=options.seed), executor)


def _warm_up(
    executor: Executor,
    options: EngineOptions,
    max_positions: int,
    page: int,
    captured: int,
    progress: Progress | None,
) -> None:
    """Run steps of every size that is not captured on the padding block, so that kernels are compiled and loaded."""
    known = {16 << shift for shift in range(20)} | set(range(1024, 16385, 1024))
    most = options.max_batched_tokens
    sizes = sorted(size for size in {size for size in known if size < most} | {most} if size > captured)
    for number, tokens in enumerate(sizes):
        one = Decode(0, KvView(np.array([page], np.int32), 1, options.page_size))
        for history in (False, True):  # with a history other kernels run
            chunks = build_dry_chunks(tokens, max_positions, options.page_size, page=page, history=history)
            for decodes in ([], [one]):
                executor.begin(Step(chunks, decodes, [Draw()] * (len(chunks) + len(decodes))))
                executor.finish()
        if progress is not None:
            progress("warming up", number + 1, len(sizes))


def _load_weights(
    model: str, config: Qwen3Config, options: EngineOptions, device: torch.device, progress: Progress | None
) -> Weights:
    if options.random_weights is not None:
        return random_weights(config, options.random_weights, device)
    report = None if progress is None else lambda done, of: progress("loading weights", done, of)
    return load_weights(config, _check_folder(model), device, progress=report)


def _check_folder(model: str) -> str:
    if not Path(model).is_dir():
        raise ConfigError(
            f"model {model!r} is not a folder with weights; give one, or random_weights with a seed"
        )
    return model

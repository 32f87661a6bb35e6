"""Small engines with random weights, and what they are compared with."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from understudy.kv import KvCacheManager
from understudy.qwen3.buffer import KvBuffer
from understudy.qwen3.config import Qwen3Config
from understudy.qwen3.engine import Engine
from understudy.qwen3.executor import TorchExecutor
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.reference import ReferenceBackend
from understudy.qwen3.request import Output, Request
from understudy.qwen3.scheduler import Scheduler
from understudy.qwen3.weights import Weights, random_weights

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CPU = torch.device("cpu")
TINY = Qwen3Config(
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=4,
    kv_heads=2,
    head_dim=16,
    vocab_size=211,
    max_positions=512,
    dtype="float32",
    tied_embeddings=True,
)
LIKE_0_6B = Qwen3Config(
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=2,
    num_heads=16,
    kv_heads=8,
    head_dim=128,
    vocab_size=1511,
    max_positions=4096,
    dtype="float32",
    tied_embeddings=True,
)
PAGE = 4
WEIGHTS = random_weights(TINY, 7, CPU)
OPEN: list[Engine | KvCacheManager] = []
"""Closed after the test."""


def folder_of(config: Qwen3Config, folder: Path) -> str:
    """A folder with its `config.json`."""
    shape = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "torch_dtype": config.dtype,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def prompt_of(seed: int, length: int, vocab: int = TINY.vocab_size) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, length)]


class Poisoned(KvBuffer):
    """Pages full of NaN: who reads a row that nobody wrote finds out."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.pages.fill_(float("nan"))


def executor_of(
    config: Qwen3Config, manager: KvCacheManager, weights: Weights | None = None
) -> TorchExecutor:
    weights = random_weights(config, 7, CPU) if weights is None else weights
    buffer = Poisoned(manager.total_blocks, manager.layout, getattr(torch, config.dtype), CPU)
    return TorchExecutor(weights, buffer, ReferenceBackend(config, CPU))


def engine_of(
    config: Qwen3Config = TINY,
    *,
    blocks: int = 64,
    page: int = PAGE,
    budget: int = 256,
    seqs: int = 16,
    caching: bool = True,
    weights: Weights | None = None,
    dtype: str | None = None,
) -> Engine:
    config = config if dtype is None else replace(config, dtype=dtype)
    manager = KvCacheManager(blocks, config.layout(page), prefix_caching=caching)
    scheduler = Scheduler(manager, SchedulerConfig(budget, seqs, config.max_positions))
    engine = Engine(scheduler, executor_of(config, manager, weights))
    OPEN.append(engine)
    return engine


def manager_of(config: Qwen3Config, blocks: int, page: int = PAGE) -> KvCacheManager:
    manager = KvCacheManager(blocks, config.layout(page))
    OPEN.append(manager)
    return manager


def generate(engine: Engine, *prompts: Sequence[int], max_tokens: int = 8, **more: Any) -> list[list[int]]:
    """The tokens of each prompt, all submitted at once. Every request must end well."""
    for number, prompt in enumerate(prompts):
        engine.submit(Request(f"r{number}", prompt, max_tokens, **more))
    outputs = engine.run()
    tokens: list[list[int]] = [[] for _ in prompts]
    for output in outputs:
        assert output.finish_reason in (None, "length", "stop"), output
        if output.token is not None:
            tokens[int(output.request_id[1:])].append(output.token)
    return tokens


def alone(prompt: Sequence[int], max_tokens: int = 8, **how: Any) -> list[int]:
    """What a request answers in an engine of its own."""
    return generate(engine_of(**how), prompt, max_tokens=max_tokens)[0]


def ends(outputs: Sequence[Output]) -> dict[str, str]:
    return {output.request_id: output.finish_reason for output in outputs if output.finish_reason is not None}


def whole(engine: Engine) -> None:
    """Nothing is held: all blocks but the padding are available."""
    manager = engine.scheduler.manager
    assert manager.available_blocks == manager.total_blocks - 1


def watched(engine: Engine) -> list[bool]:
    """Of every step, whether it was prepared while the one before it ran."""
    seen: list[bool] = []
    engine.on_step = lambda plan: seen.append(plan.step.ahead)
    return seen

"""Options of an engine, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from understudy.checks import whole_number
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.tiers.settings import TiersConfig


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of an engine. The default device is CUDA if available, with the matching backend."""

    device: str | None = None
    dtype: str | None = None
    backend: Literal["reference", "triton"] | None = None
    page_size: int = 16
    num_blocks: int | None = None
    """KV blocks (default: what fits into `memory_utilization` of the device after a worst-case step)."""
    memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_batched_tokens: int = 2048
    max_model_len: int | None = None
    prefix_caching: bool = True
    cuda_graphs: bool = True
    random_weights: int | None = None
    """Seed for random weights instead of a checkpoint."""
    seed: int = 0
    events: bool = False
    tiers: TiersConfig | None = None
    """Host memory below the device, with the simulator's settings."""
    tensor_parallel_size: int = 1
    """Processes that share the heads, one device each."""
    deadline_s: float = 60.0
    """Time limit for each process's answer, in seconds."""

    def __post_init__(self) -> None:
        for name in ("page_size", "max_num_seqs", "max_batched_tokens", "tensor_parallel_size"):
            whole_number(name, getattr(self, name), 1)
        for name in ("num_blocks", "max_model_len"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        if self.random_weights is not None:
            whole_number("random_weights", self.random_weights)
        if not 0 < self.memory_utilization <= 1:
            raise ConfigError(
                f"memory_utilization must be above 0 and at most 1, got {self.memory_utilization}"
            )

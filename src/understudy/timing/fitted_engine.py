"""`FittedEngine`: the engine of the deployment that step times were fitted to, as a timing file carries it."""

from __future__ import annotations

import math

import msgspec

from understudy.errors import ConfigError
from understudy.kind_names import KIND_MODULES
from understudy.kv.counts import count


class FittedEngine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine of a fitted deployment: its kind, its release and its KV pool."""

    name: str = "vllm"
    """Kind of engine (`understudy.kind_names`)."""
    version: str
    model: str
    """Model as it was given: a known name, or the path of a config.json."""
    block_size: int
    """Tokens per KV block."""
    num_gpu_blocks: int
    """Usable KV blocks of a rank."""
    blocks_estimated: bool
    """Whether the number of blocks was estimated from the GPU's memory; else it was given or recorded."""
    gpu_memory_utilization: float
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.name not in KIND_MODULES:
            raise ConfigError(f"engine.name must be {' or '.join(KIND_MODULES)}, got {self.name!r}")
        for field in ("block_size", "num_gpu_blocks"):
            count(f"engine.{field}", getattr(self, field), 1, ConfigError)
        share = self.gpu_memory_utilization
        if not (math.isfinite(share) and 0 < share <= 1):
            raise ConfigError(f"engine.gpu_memory_utilization must be in (0, 1], got {share}")

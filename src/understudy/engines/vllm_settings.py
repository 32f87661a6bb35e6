"""The settings of a simulated vLLM engine, with vLLM's names; `VllmConfig` checks them and makes the engine."""

from __future__ import annotations

from typing import Any, Literal

from understudy.engines.engine_config import EngineConfig
from understudy.engines.kv_groups import KvCacheGroup  # noqa: TC001  (msgspec reads the annotation)
from understudy.engines.profiles import NEWEST, VersionProfile, find_memory_share, find_profile
from understudy.engines.speculation import SpeculativeConfig  # noqa: TC001  (msgspec reads the annotation)


class VllmSettings(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of scheduler and cache under the names of `vllm serve`, and the release whose rules they follow."""

    max_num_active_seqs: int | None = None
    """Admit no request while this many run; None: `max_num_seqs`. Since vLLM 0.31."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one request per step; 0: no limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """Raise it to `max_num_batched_tokens` ÷ (running + waiting requests). Since vLLM 0.31."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed in several steps."""
    prefill_schedule_interval: int = 1
    """Steps from one that computes prompts to the next, while other requests decode. Since vLLM 0.33."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of waiting requests: by arrival, or by priority (lower first)."""
    preemption_mode: Literal["lifo", "fifo"] = "lifo"
    """Which request is preempted when blocks run out: the newest or the oldest."""
    scheduler_reserve_full_isl: bool | None = None
    """Admit a request only if blocks for its whole prompt are free; None: the release's default."""
    watermark: float = 0.0
    """Share of blocks that stay free when requests are admitted, from 0 to below 1."""
    enable_lora: bool = False
    """Whether requests may name LoRA adapters."""
    max_loras: int = 1
    """Adapters per batch: a request whose adapter does not fit waits, and others pass it. With enable_lora."""
    async_scheduling: bool | None = None
    """None: vLLM's own choice, which since 0.14 is to schedule one batch ahead where possible."""
    pipeline_parallel_size: int = 1
    """Stages of the engine: as many batches are in flight, or one more with async_scheduling. Since vLLM 0.33."""
    kv_manager: Literal["native", "kvbm"] = "native"
    """Block manager: vLLM's, or Dynamo's."""
    eviction_policy: Any = None
    """Eviction order of cached blocks; None: the manager's own."""
    speculative_config: SpeculativeConfig | None = None
    """vLLM's speculative decoding; None: off."""
    kv_cache_groups: tuple[KvCacheGroup, ...] = ()
    """Groups of layers that keep different kinds of KV; empty: one group of full attention. Since vLLM 0.33.

    Blocks of all groups are `num_gpu_blocks`; `block_size` follows from the groups: it is their unit of hashing.
    """
    prefix_cache_retention_interval: int | None = 0
    """Tokens between cached blocks of windows and states; 0: only ends of prompts; None: every block."""
    prefix_match_unit: int | None = None
    """Unit of hashing in tokens; None: the greatest common divisor of the groups' block sizes."""
    vllm_version: str = NEWEST
    """A release, such as 0.26.0 or v0.30 (default: the newest known one)."""

    @property
    def profile(self) -> VersionProfile:
        """Rules of the release."""
        return find_profile(self.vllm_version)

    @property
    def num_stages(self) -> int:
        """Number of stages of its pipeline; 1: none."""
        return self.pipeline_parallel_size

    @property
    def memory_share(self) -> float:
        """Share of a GPU's memory that the release takes unless one is given."""
        return self.profile.memory_share

    @classmethod
    def find_memory_share(cls, release: str) -> float:
        """Return the share of a GPU's memory that a release takes unless one is given."""
        return find_memory_share(release)

    @property
    def draft_tokens(self) -> int:
        """Number of tokens that speculation drafts per step."""
        return 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens

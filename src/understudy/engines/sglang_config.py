"""Settings of a simulated SGLang engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from understudy._core import SglangEngineConfig, SglangSettings
from understudy.engines.engine_config import EngineConfig
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.tiers.plan import TierPlan

_NAMES = ("schedule_policy", "radix_eviction_policy", "retraction_policy")
_OWN = (
    "max_prefill_tokens",
    "chunked_prefill_size",
    "prefill_max_requests",
    "schedule_conservativeness",
    "enable_mixed_chunk",
    "disable_radix_cache",
    "enable_priority_scheduling",
    "priority_scheduling_preemption_threshold",
    "schedule_low_priority_values_first",
    "disable_priority_preemption",
    "max_queued_requests",
)


class SglangConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of SGLang 0.5.23, with SGLang's names.

    The pool has `num_gpu_blocks` pages of `block_size` tokens (SGLang's `page_size`, 1 by default there), which is its
    `max_total_num_tokens`; `max_num_seqs` is its `max_running_requests`. `disable_overlap_schedule` runs the normal
    event loop. The host tier (HiCache) is not simulated yet.
    """

    max_prefill_tokens: int = 16384
    chunked_prefill_size: int = 8192
    """Prompt tokens of a step; -1: prompts are never split."""
    prefill_max_requests: int | None = None
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof"] = "fcfs"
    schedule_conservativeness: float = 1.0
    enable_mixed_chunk: bool = False
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    radix_eviction_policy: Literal["lru", "lfu", "slru", "fifo", "filo", "mru"] = "lru"
    enable_priority_scheduling: bool = False
    priority_scheduling_preemption_threshold: int = 10
    schedule_low_priority_values_first: bool = False
    disable_priority_preemption: bool = False
    retraction_policy: Literal["length", "priority"] = "length"
    max_queued_requests: int | None = None
    sglang_version: Literal["0.5.23"] = "0.5.23"

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        self._check_limits(("max_prefill_tokens", "prefill_max_requests", "max_queued_requests"))
        if not 0 < self.schedule_conservativeness < math.inf:
            raise ConfigError(
                f"schedule_conservativeness must be a finite number above 0, got {self.schedule_conservativeness}"
            )
        if self.max_num_batched_tokens not in (None, 8192):
            raise ConfigError(
                "max_num_batched_tokens is vLLM's name; give chunked_prefill_size or max_prefill_tokens"
            )
        if self.chunked_prefill_size != -1 and (
            self.chunked_prefill_size < 1 or self.chunked_prefill_size % self.block_size
        ):
            raise ConfigError(
                f"chunked_prefill_size must be -1 or a multiple of block_size={self.block_size}, "
                f"got {self.chunked_prefill_size}"
            )
        if self.enable_priority_scheduling and self.schedule_policy not in ("fcfs", "lof"):
            raise ConfigError(
                f"enable_priority_scheduling contradicts schedule_policy={self.schedule_policy}; choose fcfs or lof"
            )
        if not self.enable_prefix_caching:
            raise ConfigError("enable_prefix_caching is vLLM's name; give disable_radix_cache")

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """Read settings by name. ConfigError names an unknown or wrong field."""
        given = {name: value for name, value in settings.items() if name != "engine_type"}
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine: {error}") from error

    def core_config(
        self, plan: TierPlan | None, max_blocks: int, *, events: bool = False, kv_trace: bool = False
    ) -> SglangEngineConfig:
        """Build the core's form of these settings, as `EngineConfig.core_config` describes."""
        del max_blocks
        if plan is not None:
            raise ConfigError("tiers: SGLang's host tier is not simulated yet; leave them out")
        if kv_trace:
            raise ConfigError("kv_trace: SGLang engines keep no trace of blocks; leave it out")
        settings = SglangSettings()
        for name in _OWN:
            setattr(settings, name, getattr(self, name))
        settings.page_size = self.block_size
        settings.max_total_num_tokens = self.num_gpu_blocks * self.block_size
        if self.max_num_seqs is not None:
            settings.max_running_requests = self.max_num_seqs
        if self.max_model_len is not None:
            settings.context_len = self.max_model_len
        settings.overlap = not self.disable_overlap_schedule
        settings.set_names(**{name: getattr(self, name) for name in _NAMES}, tree="unified")
        return SglangEngineConfig(settings, events=events)

    @property
    def asynchronous(self) -> bool:
        """Whether the next batch is scheduled while this one runs."""
        return not self.disable_overlap_schedule

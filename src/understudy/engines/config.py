"""Configuration of a simulated engine, with vLLM's names and those of Dynamo's mocker."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from understudy._core import EngineConfig, StepTiming, python_timing
from understudy.engines.profiles import VersionProfile, profile_named
from understudy.engines.timing import Polynomial, Timing, TimingModel
from understudy.errors import ConfigError
from understudy.tiers.dynamo import take_dynamo_names
from understudy.tiers.settings import TiersConfig

_LATER = {
    **dict.fromkeys(("g1_backend", "kv_manager", "eviction_backend"), "a choice of KV manager"),
    **dict.fromkeys(("aic_nextn", "aic_nextn_accept_rates", "aic_mtp_seed"), "speculative bursts"),
    **dict.fromkeys(("sglang", "trtllm"), "other engines than vLLM"),
    **dict.fromkeys(("router_queue_policy",), "KV-aware routing"),
    **dict.fromkeys(("zmq_kv_events_port", "zmq_replay_port"), "KV events on the wire"),
    **dict.fromkeys(("worker_type", "is_prefill", "is_decode", "kv_transfer_bandwidth"), "disaggregation"),
    **dict.fromkeys(("dp_size", "startup_time"), "data parallelism and scaling"),
}
"""Names that belong to a part of Understudy that does not exist yet, and what that part is."""


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vLLM-style worker. `num_gpu_blocks` counts usable blocks (vLLM's own count has one more)."""

    block_size: int = 64
    num_gpu_blocks: int = 16384
    max_num_seqs: int | None = 256
    max_num_batched_tokens: int | None = 8192
    max_model_len: int | None = None
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["lifo", "fifo"] = "lifo"
    scheduler_reserve_full_isl: bool | None = None
    watermark: float = 0.0
    async_scheduling: bool = False
    vllm_version: str = "recorded"
    timing: Timing = Polynomial()
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    tiers: TiersConfig = TiersConfig()
    """Tiers that came with the engine's settings, under Dynamo's names."""

    def __post_init__(self) -> None:
        profile = profile_named(self.vllm_version)
        for field in (
            "block_size",
            "num_gpu_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
        ):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"{field} must be at least 1, got {value}")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                f"long_prefill_token_threshold must not be negative, got {self.long_prefill_token_threshold}"
            )
        for field in ("speedup_ratio", "decode_speedup_ratio"):
            value = getattr(self, field)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(
                    f"{field} must be finite and positive (1 leaves times as they are), got {value}"
                )
        if not 0 <= self.watermark <= 1:
            raise ConfigError(f"watermark must be in [0, 1], got {self.watermark}")
        self._require(profile)
        if self.scheduling_policy == "priority" and self.preemption_mode == "fifo":
            raise ConfigError(
                "preemption_mode=fifo contradicts scheduling_policy=priority, where priorities decide"
            )

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> VllmConfig:
        """Read settings by name, Dynamo's names of tiers among them. ConfigError names an unknown, wrong or not yet
        supported field.
        """
        settings, tiers = take_dynamo_names(settings)
        known = [name for name in cls.__struct_fields__ if name != "tiers"]
        if "planner_profile_data" in settings:
            settings = dict(settings)
            path = settings.pop("planner_profile_data")
            if "timing" in settings:
                raise ConfigError("planner_profile_data and timing both name a timing model; give one")
            settings["timing"] = {"kind": "interpolated", "path": path}
        for name in settings:
            if name in _LATER:
                raise ConfigError(f"{name} belongs to {_LATER[name]}, which this version does not have yet")
            if name == "tiers":
                raise ConfigError("tiers stand beside engine, not in it (under Dynamo's names they may)")
            if name not in known:
                raise ConfigError(f"{name} is not a setting of the engine; known are {', '.join(known)}")
        try:
            return msgspec.structs.replace(msgspec.convert(settings, cls), tiers=tiers)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine: {error}") from error

    def described(self) -> dict[str, Any]:
        """The engine's own settings as JSON can hold them; tiers are told apart."""
        described: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, tiers=TiersConfig()))
        del described["tiers"]
        return described

    def _require(self, profile: VersionProfile) -> None:
        if self.watermark and not profile.has_watermark:
            raise ConfigError(f"watermark: vLLM {profile.name} does not have it")
        if self.scheduler_reserve_full_isl and not profile.has_reserve_full_isl:
            raise ConfigError(f"scheduler_reserve_full_isl: vLLM {profile.name} does not have it")

    def native(self, *, events: bool = False, profile: VersionProfile | None = None) -> EngineConfig:
        """The core's form of these settings, under the version they name or a profile of your own."""
        profile = profile or profile_named(self.vllm_version)
        self._require(profile)
        reserve = self.scheduler_reserve_full_isl
        return EngineConfig(
            block_size=self.block_size,
            num_gpu_blocks=self.num_gpu_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.scheduling_policy,
            preemption_mode=self.preemption_mode,
            scheduler_reserve_full_isl=profile.has_reserve_full_isl if reserve is None else reserve,
            watermark=self.watermark,
            async_scheduling=self.async_scheduling,
            free_order=profile.free_order,
            phantom_hits=profile.phantom_hits,
            events=events,
        )

    def native_timing(self, model: TimingModel | None = None) -> StepTiming:
        """The timing model, or the given one written in Python, with the speed-ups."""
        if model is not None:
            return python_timing(model, self.speedup_ratio, self.decode_speedup_ratio)
        return self.timing.build(self.speedup_ratio, self.decode_speedup_ratio)

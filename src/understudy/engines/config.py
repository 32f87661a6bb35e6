"""Configuration of a simulated engine, with vLLM's names and those of Dynamo's mocker."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from understudy._core import EngineConfig, StepTiming, python_timing
from understudy.engines.profiles import VersionProfile, profile_named
from understudy.engines.timing import Polynomial, Timing, TimingModel
from understudy.errors import ConfigError

_LATER = {
    **dict.fromkeys(
        (
            "num_g2_blocks",
            "num_g3_blocks",
            "enable_g4_storage",
            "offload_batch_size",
            "kv_bytes_per_token",
            "bandwidth_g1_to_g2_gbps",
            "bandwidth_g2_to_g1_gbps",
            "bandwidth_g2_to_g3_gbps",
            "bandwidth_g3_to_g2_gbps",
            "bandwidth_g2_to_g4_gbps",
            "bandwidth_g4_to_g2_gbps",
        ),
        "tiers below the device",
    ),
    **dict.fromkeys(("aic_nextn", "aic_nextn_accept_rates", "aic_mtp_seed"), "speculative bursts"),
    **dict.fromkeys(("sglang", "trtllm"), "other engines than vLLM"),
    **dict.fromkeys(("router_queue_policy",), "KV-aware routing"),
    **dict.fromkeys(("zmq_kv_events_port", "zmq_replay_port"), "KV events on the wire"),
    **dict.fromkeys(("worker_type", "is_prefill", "is_decode", "kv_transfer_bandwidth"), "disaggregation"),
    **dict.fromkeys(("dp_size", "startup_time"), "data parallelism and scaling"),
}
"""Names that belong to a part of Understudy that does not exist yet, and what that part is."""


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A vLLM-style worker. `num_gpu_blocks` counts usable blocks (vLLM's own count has one more).

    `kv_manager` (the mocker's `g1_backend`): "native" is vLLM's, copies of a block side by side and vLLM's free list;
    "kvbm" has one physical block a hash, shared by all and visible once acquired, and evicts by `eviction_policy`
    ("lineage" if None).
    """

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
    kv_manager: Literal["native", "kvbm"] = "native"
    eviction_policy: Literal["lineage", "lru", "multi_lru"] | None = None
    vllm_version: str = "recorded"
    timing: Timing = Polynomial()
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0

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
        if self.eviction_policy is not None and self.kv_manager == "native":
            raise ConfigError(
                f"eviction_policy={self.eviction_policy} contradicts kv_manager=native, whose free list is vLLM's; "
                "leave it out, or set kv_manager=kvbm"
            )
        if self.scheduling_policy == "priority" and self.preemption_mode == "fifo":
            raise ConfigError(
                "preemption_mode=fifo contradicts scheduling_policy=priority, where priorities decide"
            )

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> VllmConfig:
        """Read settings by name. ConfigError names an unknown, wrong or not yet supported field."""
        if "planner_profile_data" in settings:
            settings = dict(settings)
            path = settings.pop("planner_profile_data")
            if "timing" in settings:
                raise ConfigError("planner_profile_data and timing both name a timing model; give one")
            settings["timing"] = {"kind": "interpolated", "path": path}
        if "g1_backend" in settings:
            settings = dict(settings)
            backend = settings.pop("g1_backend")
            if "kv_manager" in settings:
                raise ConfigError("g1_backend and kv_manager both name a KV manager; give one")
            if backend not in ("native", "kvbm"):
                raise ConfigError(f"g1_backend must be native or kvbm, got {backend!r}")
            settings["kv_manager"] = backend
        for name in settings:
            if name in _LATER:
                raise ConfigError(f"{name} belongs to {_LATER[name]}, which this version does not have yet")
            if name not in cls.__struct_fields__:
                raise ConfigError(
                    f"{name} is not a setting of the engine; known are {', '.join(cls.__struct_fields__)}"
                )
        try:
            return msgspec.convert(settings, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"engine: {error}") from error

    def _require(self, profile: VersionProfile) -> None:
        if self.watermark and not profile.has_watermark:
            raise ConfigError(f"watermark: vLLM {profile.name} does not have it")
        if self.scheduler_reserve_full_isl and not profile.has_reserve_full_isl:
            raise ConfigError(f"scheduler_reserve_full_isl: vLLM {profile.name} does not have it")

    def native(
        self,
        *,
        events: bool = False,
        kv_trace: bool = False,
        check: bool = False,
        profile: VersionProfile | None = None,
    ) -> EngineConfig:
        """The core's form of these settings, under the version they name or a profile of your own.

        `events` and `kv_trace` keep what happens to blocks until it is taken; `check` verifies conservation and the
        truth of events at the end of every step.
        """
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
            kv_manager=self.kv_manager,
            eviction_policy=self.eviction_policy or "lineage",
            free_order=profile.free_order,
            phantom_hits=profile.phantom_hits,
            events=events,
            kv_trace=kv_trace,
            check=check,
        )

    def native_timing(self, model: TimingModel | None = None) -> StepTiming:
        """The timing model, or the given one written in Python, with the speed-ups."""
        if model is not None:
            return python_timing(model, self.speedup_ratio, self.decode_speedup_ratio)
        return self.timing.build(self.speedup_ratio, self.decode_speedup_ratio)

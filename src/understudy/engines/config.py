"""Configuration of a simulated engine, with vLLM's names and those of Dynamo's mocker."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec
import numpy as np

from understudy._core import Speculation, StepTiming, VllmEngineConfig, VllmOffload, python_timing
from understudy.checks import plain_number, read_as, whole_number
from understudy.engines.mocker_names import refuse_unknown, take_mocker_names
from understudy.engines.profiles import NEWEST, VersionProfile, find_profile
from understudy.engines.speculation import SpeculativeConfig  # noqa: TC001  (msgspec reads the annotation)
from understudy.engines.timing import Polynomial, Timing, TimingModel
from understudy.errors import ConfigError
from understudy.kv.policy import check_policy
from understudy.tiers.dynamo import take_dynamo_names
from understudy.tiers.settings import TiersConfig, name_of
from understudy.tiers.vllm_flags import take_vllm_names
from understudy.timing.physical import Physical
from understudy.timing.sources import Aiconfigurator, MeasuredKernels, RecordedSteps

if TYPE_CHECKING:
    from collections.abc import Iterable

_MOST = {"block_size": 2**20, "num_gpu_blocks": 2**30}
_CHOICES = {
    "scheduling_policy": ("fcfs", "priority"),
    "preemption_mode": ("lifo", "fifo"),
    "kv_manager": ("kvbm", "native"),
}
_SWITCHES = (
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "enable_lora",
    "charge_first_token",
    "long_prefill_token_threshold_adaptive",
)
_MTP_SEED = 42
_OPTIONAL_SWITCHES = ("scheduler_reserve_full_isl", "async_scheduling")
"""None: the release's default."""

_WHOLE_STEPS = Physical | MeasuredKernels | Aiconfigurator | RecordedSteps
"""Timing models of whole steps, which do not time decoding separately."""

_KVBM_ORDERS = ("lineage", "lru", "multi_lru")
"""Eviction policies of Dynamo's block manager."""

DEFAULT_MAX_NUM_SEQS = 256
"""Lowered to a smaller `max_num_batched_tokens`, as in vLLM; an explicit value is not."""


class VllmConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a vLLM worker. `num_gpu_blocks` counts usable blocks (vLLM's own count has one more).

    `kv_manager` (the mocker's `g1_backend`): "native" is vLLM's, with several copies of a block and vLLM's free list;
    "kvbm" has one physical block per hash, shared by all requests and matchable once acquired.

    `eviction_policy` is the eviction order: a built-in policy by name (`understudy.kv.BUILT_IN_POLICIES`), or a class
    (or another callable without arguments) that creates an `EvictionPolicy` for each worker. None is the manager's own
    order: vLLM's free list, or "lineage" under "kvbm". With any other, schedules differ from the real engine's.

    `aic_nextn` draft tokens are verified in every step that samples; `aic_nextn_accept_rates` are the probabilities
    that each is accepted if those before it were ("0.85,0.3"; missing ones are 0, more than `aic_nextn` are cut off).
    Worker i samples from the stream `aic_mtp_seed` + i.

    `speculative_config` is vLLM's speculation, which differs from the mocker's above.

    `vllm_version` is a release, such as 0.26.0 or v0.30 (default: the newest known one).
    """

    block_size: int = 64
    num_gpu_blocks: int = 16384
    max_num_seqs: int | None = DEFAULT_MAX_NUM_SEQS
    max_num_batched_tokens: int | None = 8192
    max_num_active_seqs: int | None = None
    max_model_len: int | None = None
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    prefill_schedule_interval: int = 1
    """Steps from one that computes prompts to the next, while other requests decode. Since vLLM 0.33."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["lifo", "fifo"] = "lifo"
    scheduler_reserve_full_isl: bool | None = None
    watermark: float = 0.0
    enable_lora: bool = False
    max_loras: int = 1
    """Adapters per batch: a request whose adapter does not fit waits, and others pass it. With enable_lora."""
    data_parallel_size: int = 1
    """Data-parallel ranks of a worker: separate engines, each with all these blocks, behind one front end."""
    async_scheduling: bool | None = None
    """None: vLLM's own choice, which since 0.14 is to schedule one batch ahead where possible."""
    kv_manager: Literal["native", "kvbm"] = "native"
    eviction_policy: Any = None
    aic_nextn: int | None = None
    aic_nextn_accept_rates: str | None = None
    aic_mtp_seed: int = _MTP_SEED
    speculative_config: SpeculativeConfig | None = None
    vllm_version: str = NEWEST
    timing: Timing = Polynomial()
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    charge_first_token: bool = True
    """False: no decode time for requests whose prompt ends in the step, as in Dynamo's mocker 1.6.1."""
    tiers: TiersConfig = TiersConfig()
    """Tiers from Dynamo's names among the engine's settings."""

    def __post_init__(self) -> None:
        self._check_types()
        profile = find_profile(self.vllm_version)
        for field in (
            "block_size",
            "num_gpu_blocks",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_num_active_seqs",
            "max_model_len",
            "max_loras",
            "prefill_schedule_interval",
            "data_parallel_size",
        ):
            if (value := getattr(self, field)) is not None:
                value = whole_number(field, value, 1, _MOST.get(field))
                msgspec.structs.force_setattr(self, field, value)
        threshold = whole_number("long_prefill_token_threshold", self.long_prefill_token_threshold)
        msgspec.structs.force_setattr(self, "long_prefill_token_threshold", threshold)
        if self.max_num_active_seqs is not None and self.max_num_active_seqs > (
            self.max_num_seqs or self.max_num_active_seqs
        ):
            raise ConfigError(
                f"max_num_active_seqs={self.max_num_active_seqs} must not be above max_num_seqs={self.max_num_seqs}"
            )
        for field in ("speedup_ratio", "decode_speedup_ratio"):
            value = getattr(self, field)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(
                    f"{field} must be finite and positive (1 leaves times as they are), got {value}"
                )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark must be in [0, 1), got {self.watermark}")
        self._check_limits()
        self._check_profile_has(profile, self.vllm_version)
        self._refuse_unused()
        if self.eviction_policy is not None:
            check_policy("eviction_policy", self.eviction_policy)
        if self.scheduling_policy == "priority" and self.preemption_mode == "fifo":
            raise ConfigError(
                "preemption_mode=fifo contradicts scheduling_policy=priority, where priorities decide; leave it out"
            )
        self._check_speculation()

    def _check_limits(self) -> None:
        """Refuse limits that contradict each other, as vLLM does."""
        budget = self.max_num_batched_tokens
        if budget is not None and self.max_num_seqs is not None and self.max_num_seqs > budget:
            if self.max_num_seqs != DEFAULT_MAX_NUM_SEQS:
                raise ConfigError(
                    f"max_num_seqs={self.max_num_seqs} must not be above max_num_batched_tokens={budget}: "
                    "every request of a batch computes at least one token"
                )
            msgspec.structs.force_setattr(self, "max_num_seqs", budget)
        if self.max_model_len is not None and self.long_prefill_token_threshold > self.max_model_len:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} must not be above "
                f"max_model_len={self.max_model_len}"
            )

    def _refuse_unused(self) -> None:
        """Refuse settings without an effect, because they need another one."""
        if self.max_loras != 1 and not self.enable_lora:
            raise ConfigError("max_loras needs enable_lora, without which requests name no adapter")
        if self.long_prefill_token_threshold_adaptive and not self.long_prefill_token_threshold:
            raise ConfigError(
                "long_prefill_token_threshold_adaptive needs long_prefill_token_threshold, which it raises"
            )

    def _check_types(self) -> None:
        """Check types of values passed to the class; `from_dict` checks them while reading."""
        timing: Any = self.timing
        if not isinstance(timing, Timing):
            kinds = ", ".join(kind.__name__ for kind in get_args(Timing))
            raise ConfigError(
                f"timing must be one of {kinds}, got {timing!r}; pass a user-defined model to understudy.replay"
            )
        version: Any = self.vllm_version
        if not isinstance(version, str):
            raise ConfigError(f"vllm_version must be text, as '0.26.0', got {version!r}")
        for field, choices in _CHOICES.items():
            if (value := getattr(self, field)) not in choices:
                raise ConfigError(f"{field} must be one of {', '.join(choices)}; got {value!r}")
        for field in ("speedup_ratio", "decode_speedup_ratio", "watermark"):
            msgspec.structs.force_setattr(self, field, plain_number(field, getattr(self, field)))
        for field in (*_SWITCHES, *_OPTIONAL_SWITCHES):
            value = getattr(self, field)
            if isinstance(value, np.bool_):
                msgspec.structs.force_setattr(self, field, bool(value))
            elif not isinstance(value, bool) and (value is not None or field in _SWITCHES):
                raise ConfigError(f"{field} must be True or False, got {value!r}")

    def _check_speculation(self) -> None:
        if not 0 <= self.aic_mtp_seed < 2**64:
            raise ConfigError(f"aic_mtp_seed must be in 0 … 2^64−1, got {self.aic_mtp_seed}")
        if self.speculative_config is not None:
            if self.aic_nextn is not None:
                raise ConfigError(
                    "aic_nextn contradicts speculative_config (vLLM's own speculation); give one"
                )
            if self.async_scheduling and self.speculative_config.method == "ngram":
                raise ConfigError(
                    "async_scheduling contradicts method ngram, which needs the tokens of a batch before the next is "
                    "scheduled; leave it out (mtp, eagle, eagle3 and draft_model support it)"
                )
            if self.kv_manager == "kvbm":
                raise ConfigError(
                    "speculative_config needs kv_manager=native, where rejected drafts stay in their blocks"
                )
            self.speculative_config.native(find_profile(self.vllm_version), self.max_num_seqs)
        if self.aic_nextn is None:
            if self.aic_nextn_accept_rates is not None:
                raise ConfigError("aic_nextn_accept_rates needs aic_nextn, the number of draft tokens")
            if self.aic_mtp_seed != _MTP_SEED:  # the mocker writes its default without drafts too
                raise ConfigError("aic_mtp_seed needs aic_nextn, the number of draft tokens")
            return
        if not 1 <= self.aic_nextn <= 5:
            raise ConfigError(f"aic_nextn must be in 1 … 5, got {self.aic_nextn}")
        if self.decode_speedup_ratio != 1:
            raise ConfigError(
                "decode_speedup_ratio contradicts aic_nextn: speculation makes decoding faster by itself; leave it at 1"
            )
        if self.async_scheduling:
            raise ConfigError(
                "async_scheduling contradicts aic_nextn: the next step is scheduled before a burst is known"
            )
        rates = _read_rates(self.aic_nextn_accept_rates, self.aic_nextn)
        normalised = ",".join(f"{rate:g}" if float(f"{rate:g}") == rate else repr(rate) for rate in rates)
        msgspec.structs.force_setattr(self, "aic_nextn_accept_rates", normalised)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> VllmConfig:
        """Read settings by name, with Dynamo's names of tiers and vLLM's of its offload.

        ConfigError names an unknown, wrong or not yet supported field.
        """
        settings, tiers = take_dynamo_names(settings)
        settings, offload = take_vllm_names(settings)
        if offload is not None:
            if tiers.tiers:
                raise ConfigError("vLLM's offload contradicts Dynamo's tiers; give one")
            tiers = TiersConfig.from_dict({**offload, "kv_bytes_per_token": tiers.kv_bytes_per_token})
        settings = take_mocker_names(settings)
        refuse_unknown(settings, [name for name in cls.__struct_fields__ if name != "tiers"])
        return msgspec.structs.replace(read_as(cls, settings, "engine"), tiers=tiers)

    @property
    def accept_rates(self) -> list[float]:
        """Accept rate of every draft token; empty without speculation."""
        return [] if self.aic_nextn is None else _read_rates(self.aic_nextn_accept_rates, self.aic_nextn)

    @property
    def asynchronous(self) -> bool:
        """Whether the next batch is scheduled while this one runs: as set, or the version's default."""
        return self._schedules_ahead(find_profile(self.vllm_version))

    def _schedules_ahead(self, profile: VersionProfile) -> bool:
        if self.async_scheduling is not None:
            return self.async_scheduling
        method = None if self.speculative_config is None else self.speculative_config.method
        return self.aic_nextn is None and (method is None or method in profile.async_methods)

    @property
    def has_engine_eviction_order(self) -> bool:
        """Whether the eviction order is one that the real engine has, so that schedules can be exact."""
        if self.kv_manager == "kvbm":
            return self.eviction_policy in (None, *_KVBM_ORDERS)
        appends = {"all_last": True, "uncached_last": not self.enable_prefix_caching}
        profile = find_profile(self.vllm_version)
        free_list = "vllm_append" if appends.get(profile.free_order, False) else "vllm"
        return self.eviction_policy in (None, free_list)

    def describe(self) -> dict[str, Any]:
        """Return the engine's settings without tiers, as JSON values."""
        alone = msgspec.structs.replace(self, tiers=TiersConfig())
        described: dict[str, Any] = msgspec.to_builtins(alone, enc_hook=name_of)
        del described["tiers"]
        return {**described, "async_scheduling": self.asynchronous}

    def _check_profile_has(self, profile: VersionProfile, called: str) -> None:
        """Refuse settings that the profile does not have; `called` is the version as the user gave it."""
        if self.watermark and not profile.has_watermark:
            raise ConfigError(f"watermark is not a setting of vLLM {called}; leave it out")
        if self.scheduler_reserve_full_isl and not profile.has_reserve_full_isl:
            raise ConfigError(f"scheduler_reserve_full_isl is not a setting of vLLM {called}; leave it out")
        if self.prefill_schedule_interval > 1 and not profile.has_prefill_interval:
            raise ConfigError(
                f"prefill_schedule_interval has no effect on a single engine of vLLM {called}; choose 0.33 or newer"
            )
        for field in ("max_num_active_seqs", "long_prefill_token_threshold_adaptive"):
            if getattr(self, field) and not profile.has_active_seqs:
                raise ConfigError(f"{field} is not a setting of vLLM {called}; choose 0.31 or newer")

    def native(
        self,
        *,
        events: bool = False,
        kv_trace: bool = False,
        stay_sample: float = 0.0,
        check: bool = False,
        profile: VersionProfile | None = None,
        offload: VllmOffload | None = None,
    ) -> VllmEngineConfig:
        """The core's form of these settings, under the version they name or a profile of your own.

        `events` and `kv_trace` keep events and trace records until they are taken; `check` verifies conservation of
        blocks and events at the end of every step. Residence times are measured for the share `stay_sample` of blocks.
        """
        profile = profile or find_profile(self.vllm_version)
        self._check_profile_has(profile, profile.name)
        reserve = self.scheduler_reserve_full_isl
        return VllmEngineConfig(
            block_size=self.block_size,
            num_gpu_blocks=self.num_gpu_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            max_num_active_seqs=self.max_num_active_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=self.long_prefill_token_threshold_adaptive,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            policy=self.scheduling_policy,
            preemption_mode=self.preemption_mode,
            scheduler_reserve_full_isl=profile.has_reserve_full_isl if reserve is None else reserve,
            watermark=self.watermark,
            async_scheduling=self._schedules_ahead(profile),
            kv_manager=self.kv_manager,
            eviction_policy=self.eviction_policy,
            accept_rates=self.accept_rates,
            burst_seed=self.aic_mtp_seed,
            speculation=Speculation()
            if self.speculative_config is None
            else Speculation(
                **self.speculative_config.native(
                    profile, self.max_num_seqs, has_connector=offload is not None
                )
            ),
            free_order=profile.free_order,
            phantom_hits=profile.phantom_hits,
            caps_lone_prefill=profile.caps_lone_prefill,
            offload=offload,
            events=events,
            kv_trace=kv_trace,
            stay_sample=stay_sample,
            check=check,
            max_loras=self.max_loras if self.enable_lora else None,
            preempted_first=profile.preempted_first,
            self_preemption_ends=profile.self_preemption_ends,
            counts_running_loras=profile.counts_running_loras,
            prefill_schedule_interval=self.prefill_schedule_interval,
        )

    def native_timing(self, model: TimingModel | None = None) -> StepTiming:
        """Build the timing model, or wrap the given Python one, with the speed-up ratios."""
        if model is not None:
            built = python_timing(model, self.speedup_ratio, self.decode_speedup_ratio)
        else:
            if not self.charge_first_token and isinstance(self.timing, _WHOLE_STEPS):
                raise ConfigError(
                    "charge_first_token needs a timing model that times decoding separately; this one times whole "
                    "steps: leave it out"
                )
            built = self.timing.build(self.speedup_ratio, self.decode_speedup_ratio)
        built.charges_first_token = self.charge_first_token
        return built


def describe_scheduling(engines: Iterable[VllmConfig]) -> str:
    """Describe how these engines schedule: asynchronous, synchronous, or both."""
    modes = {"asynchronous" if engine.asynchronous else "synchronous" for engine in engines}
    return " and ".join(sorted(modes))


def _read_rates(text: str | None, count: int) -> list[float]:
    """Parse the rates of `count` draft tokens, padded with 0 or cut off. ConfigError names a wrong one."""
    rates: list[float] = []
    for index, part in enumerate((text or "0.85,0.3").split(",")):
        try:
            rate = float(part)
        except ValueError:
            raise ConfigError(f"aic_nextn_accept_rates[{index}] is not a number: {part!r}") from None
        if not 0 <= rate <= 1:
            raise ConfigError(f"aic_nextn_accept_rates[{index}] must be in [0, 1], got {part.strip()}")
        rates.append(rate)
    return (rates + [0.0] * count)[:count]

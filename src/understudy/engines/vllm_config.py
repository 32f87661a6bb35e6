"""Configuration of a simulated vLLM engine, with vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy._core import (
    GroupLayout,
    Speculation,
    StepTiming,
    Tier,
    TierConfig,
    VllmEngine,
    VllmEngineConfig,
    VllmOffload,
    with_groups,
    with_transfer,
)
from understudy.checks import plain_number, read_as, whole_number
from understudy.context_parallel import refuse_context_parallel
from understudy.defaults import Default
from understudy.engines.block_counts import BlockCounts
from understudy.engines.chosen import apply_limits, choose_block_size
from understudy.engines.core_fields import fields_of
from understudy.engines.group_checks import check_groups, refuse_with_groups, refuse_without_groups
from understudy.engines.kv_groups import take_kind_names
from understudy.engines.mocker_names import refuse_unknown, take_mocker_names
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.offload import build_vllm_offload
from understudy.engines.pipeline import note_pipeline, refuse_pipeline, spaces_decodes
from understudy.engines.speculation_cost import add_drafter, note_speculation
from understudy.engines.vllm_checks import (
    fit_defaults,
    refuse_absent,
    refuse_contradictions,
    refuse_speculation,
    refuse_unused,
)
from understudy.engines.vllm_settings import VllmSettings
from understudy.errors import ConfigError
from understudy.kv.policy import read_policy
from understudy.tiers.dynamo import take_dynamo_names
from understudy.tiers.plan import TierPlan
from understudy.tiers.settings import TiersConfig
from understudy.tiers.vllm_flags import take_vllm_names
from understudy.timing.contexts import known_context

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from understudy._core import EngineConfig as CoreConfig
    from understudy._core import VllmTransfer
    from understudy.defaults import BatchLimits
    from understudy.engines.interface import Engine
    from understudy.engines.profiles import VersionProfile
    from understudy.tiers.gpu import GpuSettings

_CHOICES = {
    "scheduling_policy": ("fcfs", "priority"),
    "preemption_mode": ("lifo", "fifo"),
    "kv_manager": ("kvbm", "native"),
}
_SWITCHES = (
    "enable_chunked_prefill",
    "enable_lora",
    "long_prefill_token_threshold_adaptive",
)
_OPTIONAL_SWITCHES = ("scheduler_reserve_full_isl", "async_scheduling")
"""None: the release's default."""

_KVBM_ORDERS = ("lineage", "lru", "multi_lru")
"""Eviction policies of Dynamo's block manager."""


class VllmConfig(VllmSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a vLLM worker. `num_gpu_blocks` counts usable blocks (vLLM's own count has one more).

    `kv_manager` (the mocker's `g1_backend`): "native" is vLLM's, with several copies of a block and vLLM's free list;
    "kvbm" has one physical block per hash, shared by all requests and matchable once acquired.

    `eviction_policy` is the eviction order: a built-in policy by name (`understudy.kv.BUILT_IN_POLICIES`),
    `FILE.py:CLASS`, or a class (or another callable without arguments) that creates an `EvictionPolicy` for each
    worker. None is the manager's own order: vLLM's free list, or "lineage" under "kvbm". With any other, schedules
    differ from the real engine's.

    `speculative_config` is vLLM's speculation, which differs from the mocker's (`MockerSettings.aic_nextn`).

    Errors: ConfigError names the wrong field, or one that the release does not have.

    Example:
        engine = us.VllmConfig(num_gpu_blocks=900, max_num_seqs=64, vllm_version="0.30")
        report = us.replay("trace.jsonl", engine)
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_types()
        self._check_limits(
            (
                *("max_num_active_seqs", "max_loras", "prefill_schedule_interval", "prefix_match_unit"),
                "pipeline_parallel_size",
            )
        )
        threshold = whole_number("long_prefill_token_threshold", self.long_prefill_token_threshold)
        msgspec.structs.force_setattr(self, "long_prefill_token_threshold", threshold)
        fit_defaults(self)
        refuse_contradictions(self)
        refuse_absent(self, self.profile, self.vllm_version)
        refuse_pipeline(self, self.profile, self.vllm_version)
        refuse_unused(self)
        if self.eviction_policy is not None:
            policy = read_policy("eviction_policy", self.eviction_policy)
            msgspec.structs.force_setattr(self, "eviction_policy", policy)
        if self.scheduling_policy == "priority" and self.preemption_mode == "fifo":
            raise ConfigError(
                "preemption_mode=fifo contradicts scheduling_policy=priority, where priorities decide; leave it out"
            )
        refuse_speculation(self)
        self._use_groups()

    def _use_groups(self) -> None:
        """Check the KV cache groups, and set `block_size` to their unit of hashing."""
        if self.kv_cache_groups:
            check_groups(self)
            unit = self._hashing_unit()
            if self.block_size != unit and not isinstance(self.block_size, Default):
                raise ConfigError(
                    f"block_size={self.block_size} contradicts kv_cache_groups: it is their unit of hashing, {unit}; "
                    "leave it out"
                )
            msgspec.structs.force_setattr(self, "block_size", unit)

    @property
    def group_layout(self) -> GroupLayout | None:
        """Sizes of the KV cache groups; None without them."""
        return GroupLayout(self.native()) if self.kv_cache_groups else None

    def _hashing_unit(self) -> int:
        try:
            return GroupLayout(self.native()).hash_block_size
        except ConfigError as error:
            start = "groups: "
            if not str(error).startswith(start):
                raise
            raise ConfigError(f"kv_cache_groups: {str(error).removeprefix(start)}") from error

    def _check_types(self) -> None:
        """Check types of values passed to the class; `from_dict` checks them while reading."""
        version: Any = self.vllm_version
        if not isinstance(version, str):
            raise ConfigError(f"vllm_version must be text, as '0.26.0', got {version!r}")
        for field, choices in _CHOICES.items():
            if (value := getattr(self, field)) not in choices:
                raise ConfigError(f"{field} must be one of {', '.join(choices)}; got {value!r}")
        msgspec.structs.force_setattr(self, "watermark", plain_number("watermark", self.watermark))
        self._check_switches(_SWITCHES)
        self._check_switches(_OPTIONAL_SWITCHES, optional=True)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> VllmConfig:
        """Read settings by name, with Dynamo's names of tiers and vLLM's of its offload.

        ConfigError names an unknown, wrong or not yet supported field.
        """
        refuse_context_parallel(settings)
        settings, tiers = take_dynamo_names(settings)
        settings, offload = take_vllm_names(settings)
        if offload is not None:
            if tiers.tiers:
                raise ConfigError("vLLM's offload contradicts Dynamo's tiers; give one")
            tiers = TiersConfig.from_dict({**offload, "kv_bytes_per_token": tiers.kv_bytes_per_token})
        settings = take_mocker_names(take_kind_names(settings))
        apart = {name: settings.pop(name) for name in MockerSettings.__struct_fields__ if name in settings}
        known = [name for name in cls.__struct_fields__ if name not in ("mocker", "tiers")]
        refuse_unknown(settings, [*known, *MockerSettings.__struct_fields__])
        mocker = read_as(MockerSettings, apart, "engine")
        given = settings.get("block_size")
        engine = read_as(cls, settings, "engine")
        if engine.kv_cache_groups and given not in (None, engine.block_size):
            raise ConfigError(
                f"block_size={given} contradicts kv_cache_groups: it is their unit of hashing, {engine.block_size}; "
                "leave it out"
            )
        return msgspec.structs.replace(engine, mocker=mocker, tiers=tiers)

    def choose_defaults(self, gpu: GpuSettings, model: str | None) -> Self:
        """Replace limits and block size that were not given by those that vLLM chooses for the model on this GPU."""
        limits = gpu.batch_limits(has_largest=self.profile.has_largest_limits)
        if not self.enable_chunked_prefill and self.max_model_len is None and model is not None:
            whole = max(limits.max_num_batched_tokens, known_context(model) or 0)
            limits = limits._replace(max_num_batched_tokens=whole)
        return apply_limits(self, limits, block_size=None if model is None else choose_block_size(model))

    def choose_limits(self, limits: BatchLimits) -> Self:
        """Replace limits that were not given."""
        return apply_limits(self, limits)

    def drop_unused_group_settings(self) -> Self:
        """Return these settings; without those of KV cache groups if it has none."""
        if self.kv_cache_groups:
            return self
        return msgspec.structs.replace(self, prefix_cache_retention_interval=0, prefix_match_unit=None)

    @property
    def asynchronous(self) -> bool:
        """Whether the next batch is scheduled while this one runs: as set, or the version's default."""
        return self._schedules_ahead(self.profile)

    def _schedules_ahead(self, profile: VersionProfile) -> bool:
        if self.async_scheduling is not None:
            return self.async_scheduling
        method = None if self.speculative_config is None else self.speculative_config.method
        return self.mocker.aic_nextn is None and (method is None or method in profile.async_methods)

    @property
    def has_engine_eviction_order(self) -> bool:
        """Whether the eviction order is one that the real engine has, so that schedules can be exact."""
        if self.kv_manager == "kvbm":
            return self.eviction_policy in (None, *_KVBM_ORDERS)
        appends = {"all_last": True, "uncached_last": not self.enable_prefix_caching}
        free_list = "vllm_append" if appends.get(self.profile.free_order, False) else "vllm"
        return self.eviction_policy in (None, free_list)

    @property
    def accepts_adapters(self) -> bool:
        """Whether requests may name LoRA adapters."""
        return self.enable_lora

    @property
    def orders_by_name(self) -> bool:
        """Whether names of requests break ties in scheduling order."""
        return self.scheduling_policy == "priority"

    @property
    def has_user_policy(self) -> bool:
        """Whether a user-defined policy chooses the device blocks to evict."""
        return not isinstance(self.eviction_policy, str | None)

    def describe(self) -> dict[str, Any]:
        """Return the engine's settings without tiers, as JSON values."""
        return {**super().describe(), "async_scheduling": self.asynchronous}

    def notes(self, *, own_times: bool = False) -> list[str]:
        """Note the acceptance and the cost of drafts, and an eviction order that vLLM does not have."""
        notes = [*note_speculation(self, own_times=own_times), *note_pipeline(self)]
        if self.has_engine_eviction_order:
            return notes
        return [
            *notes,
            f"eviction_policy={self.describe()['eviction_policy']} is not the order of {self.kv_manager} blocks: "
            f"the run is not step-exact with vLLM {self.vllm_version}",
        ]

    def _add_drafter(self, timing: StepTiming) -> StepTiming:
        """Add the passes of the drafter, if its times follow from a model and a GPU."""
        return add_drafter(timing, self)

    def check_recordable(self) -> None:
        """Refuse user-defined policies: a recorded step lists the next blocks to evict, which they do not expose.

        Several KV cache groups are recorded in another form (`understudy conformance`).
        """
        refuse_with_groups(record_steps=bool(self.kv_cache_groups))
        if self.has_user_policy:
            raise ConfigError(
                "record_steps lists the next blocks to evict, which the user-defined eviction_policy "
                f"{self.describe()['eviction_policy']} does not expose; name a built-in policy, or leave record_steps "
                "out"
            )

    def core_config(
        self, plan: TierPlan | None, max_blocks: int, *, events: bool = False, kv_trace: bool = False
    ) -> VllmEngineConfig:
        """Build the core's form of these settings, with vLLM's offload if the tiers ask for it."""
        refuse_without_groups(self)
        refuse_with_groups(kv_trace=kv_trace and bool(self.kv_cache_groups))
        offload = build_vllm_offload(plan, self, max_blocks)
        return self.native(events=events, kv_trace=kv_trace, offload=offload)

    def core_side(self, config: CoreConfig, role: str, transfer: VllmTransfer) -> VllmEngineConfig:  # noqa: ARG002
        """Return the core's form of a worker that keeps blocks for others, or pulls them."""
        assert isinstance(config, VllmEngineConfig)
        return with_transfer(config, transfer)

    def build_live_offload(self, tiers: TiersConfig, max_blocks: int) -> VllmOffload | None:
        """Build vLLM's own offload of a live engine, if the tiers ask for one."""
        return build_vllm_offload(TierPlan.of(tiers, self.block_size), self, max_blocks, samples=True)

    def live_config(
        self,
        *,
        events: bool = False,
        check: bool = False,
        stay_sample: float = 0.0,
        tiers: TierConfig | None = None,  # noqa: ARG002 - other kinds of engines need it
        offload: VllmOffload | None = None,
    ) -> VllmEngineConfig:
        """Build the core's form for a live engine."""
        refuse_without_groups(self)
        return self.native(
            events=events, check=check, offload=offload, stay_sample=stay_sample, event_ranges=True
        )

    def count_blocks(self, engine: Engine, tiers: Sequence[str]) -> dict[str, BlockCounts]:
        """Count the blocks of the pool, and of tiers below it."""
        if not isinstance(engine, VllmEngine):
            return super().count_blocks(engine, tiers)
        counts = {"device": BlockCounts(*engine.pool)}
        for name in tiers:
            free, active, cached, _ = engine.tier_blocks(Tier[name.upper()])
            counts[name] = BlockCounts(free, active, cached)
        return counts

    def native(
        self,
        *,
        events: bool = False,
        kv_trace: bool = False,
        stay_sample: float = 0.0,
        check: bool = False,
        profile: VersionProfile | None = None,
        offload: VllmOffload | None = None,
        event_ranges: bool = False,
    ) -> VllmEngineConfig:
        """The core's form of these settings, under the version they name or a profile of your own.

        `events` and `kv_trace` keep events and trace records until they are taken; `check` verifies conservation of
        blocks and events at the end of every step. Residence times are measured for the share `stay_sample` of blocks.
        `event_ranges`: events of several groups also have the tokens of blocks without a key, as on the wire.
        """
        profile = profile or self.profile
        refuse_absent(self, profile, profile.name)
        is_asynchronous = self._schedules_ahead(profile)
        reserve = self.scheduler_reserve_full_isl
        drafts = self.speculative_config
        speculation = None
        if drafts is not None:
            has_connector = offload is not None
            speculation = Speculation(
                **drafts.native(profile, self.max_num_seqs, has_connector=has_connector)
            )
        config = VllmEngineConfig(
            **fields_of(
                VllmEngineConfig,
                profile,
                self,
                scheduler_reserve_full_isl=profile.has_reserve_full_isl if reserve is None else reserve,
                async_scheduling=is_asynchronous,
                spaces_decodes=spaces_decodes(self, is_asynchronous=is_asynchronous),
                mocker=self.mocker.native(),
                speculation=speculation,
                offload=offload,
                events=events,
                kv_trace=kv_trace,
                stay_sample=stay_sample,
                check=check,
                max_loras=self.max_loras if self.enable_lora else None,
            )
        )
        if not self.kv_cache_groups:
            return config
        return with_groups(
            config,
            [group.native() for group in self.kv_cache_groups],
            prefix_match_unit=self.prefix_match_unit or 0,
            prefix_cache_retention_interval=self.prefix_cache_retention_interval,
            event_ranges=event_ranges,
        )

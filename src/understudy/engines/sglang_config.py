"""Settings of a simulated SGLang engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from understudy._core import SglangEngine, SglangEngineConfig, SglangSettings, Tier, with_role
from understudy.checks import read_as, whole_number
from understudy.defaults import Default
from understudy.engines.block_counts import BlockCounts
from understudy.engines.engine_config import EngineConfig
from understudy.engines.mocker_names import refuse_unknown
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.sglang_pools import check_pools, set_pools
from understudy.engines.sglang_side import check_side, set_side
from understudy.errors import ConfigError
from understudy.tiers.settings import OffloadSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import EngineConfig as CoreConfig
    from understudy._core import TierConfig, VllmOffload, VllmTransfer
    from understudy.engines.interface import Engine
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


SGLANG_NAMES = {
    "page_size": "block_size",
    "max_total_tokens": "num_gpu_blocks",
    "max_running_requests": "max_num_seqs",
    "context_length": "max_model_len",
}
"""SGLang's names of settings that engines of every kind have."""
_DEFAULT_POOL = 2**20  # tokens


class SglangConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of SGLang 0.5.23, with SGLang's names and defaults.

    `block_size` is SGLang's `page_size`, `max_num_seqs` its `max_running_requests`, `max_model_len` its
    `context_length`; the pool has `num_gpu_blocks` pages, which is its `max_total_tokens` in pages. `from_dict` reads
    both spellings. `disable_overlap_schedule` runs the normal event loop. With a G2 tier the engine has a host cache
    (HiCache) of that size; tiers below it are refused.

    Errors: ConfigError names the wrong field, or one of vLLM.

    Example:
        engine = us.SglangConfig(block_size=64, schedule_policy="lpm")
        report = us.replay("trace.jsonl", engine)
    """

    block_size: int = 1
    """Tokens of a page."""
    num_gpu_blocks: int = -1
    """Pages of the KV pool; -1: 2^20 tokens."""
    max_num_seqs: int | None = None
    """Most requests at a time; None: SGLang's rule, 2048 to 4096 by pool and context."""
    max_num_batched_tokens: int | None = 8192
    """Not a setting of SGLang: give `chunked_prefill_size` or `max_prefill_tokens`."""
    max_prefill_tokens: int = 16384
    """Prompt tokens of a batch; the first prompt is taken whatever its length."""
    chunked_prefill_size: int = 8192
    """Prompt tokens of a step; -1: prompts are never split."""
    prefill_max_requests: int | None = None
    """Most requests of a prefill batch; None: no limit."""
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof"] = "fcfs"
    """Order of waiting requests: arrival, longest cached prefix, depth-first weight, or longest output first."""
    schedule_conservativeness: float = 1.0
    """Factor on the share of outputs that admissions reserve memory for."""
    enable_mixed_chunk: bool = False
    """Decode in steps that compute prompts."""
    disable_radix_cache: bool = False
    """Reuse no prefixes."""
    disable_overlap_schedule: bool = False
    """Schedule a batch only when the one before has ended."""
    radix_eviction_policy: Literal["lru", "lfu", "slru", "fifo", "filo", "mru"] = "lru"
    """Order in which leaves of the radix cache are evicted."""
    enable_priority_scheduling: bool = False
    """Order requests by priority; needs fcfs or lof. A request without a priority has the worst one."""
    priority_scheduling_preemption_threshold: int = 10
    """Preempt only for a priority that is better by more."""
    schedule_low_priority_values_first: bool = False
    """Lower values are better priorities."""
    disable_priority_preemption: bool = False
    """Preempt for no priority."""
    retraction_policy: Literal["length", "priority"] = "length"
    """Requests to retract first when memory is short: those with few outputs, or with a bad priority."""
    max_queued_requests: int | None = None
    """Most waiting requests; more are aborted. None: no limit."""
    hicache_write_policy: Literal["write_through", "write_through_selective", "write_back"] = "write_through"
    """When the host cache gets pages; used with a G2 tier only."""
    load_back_threshold: int = 10
    """Fewest tokens that are loaded from the host; fewer are computed again."""
    swa_window: int | None = None
    """Tokens of the model's sliding windows, whose KV has a pool of its own; None: all layers have full attention."""
    swa_full_tokens_ratio: float = 0.8
    """Tokens of the window pool per token of the full pool."""
    max_mamba_cache_size: int | None = None
    """Slots for states of the model's recurrent layers; None: the model has none."""
    mamba_full_memory_ratio: float = 0.9
    """Memory of states per memory of KV, where the slots follow from a GPU's memory."""
    mamba_radix_cache_strategy: Literal["auto", "no_buffer", "extra_buffer", "extra_buffer_lazy"] = "auto"
    """How states get into the radix cache: as copies between computations, or tracked while computing."""
    mamba_track_interval: int = 256
    """Tokens between states that decoding tracks."""
    mamba_max_states_per_path: int = -1
    """Most cached states from a leaf to the root; -1: no limit."""
    num_reserved_decode_tokens: int = 512
    """Tokens that a decode server keeps free for each request with memory."""
    disaggregation_decode_enable_radix_cache: bool = False
    """Whether a decode server reuses prefixes, which then need no transfer."""
    disaggregation_decode_extra_slots: int | None = None
    """Slots of a decode server for requests whose KV is on its way; None: SGLang's rule."""
    disaggregation_decode_polling_interval: int = 1
    """Iterations of a decode server between two looks at its transfers."""
    disaggregation_decode_retraction_backup: Literal["cpu_tensor", "host_pool", "none"] | None = None
    """Where a decode server copies the KV of retracted requests; none: they are aborted. None: SGLang's rule."""
    sglang_version: Literal["0.5.23"] = "0.5.23"
    """Release to simulate."""

    def __post_init__(self) -> None:
        if self.num_gpu_blocks == -1:
            pages = max(_DEFAULT_POOL // max(self.block_size, 1), 1)
            msgspec.structs.force_setattr(self, "num_gpu_blocks", Default(pages))
        EngineConfig.__post_init__(self)
        if self.mocker.aic_nextn is not None:
            raise ConfigError(
                "aic_nextn contradicts engine sglang, whose speculation is not simulated; leave it out"
            )
        whole_number("load_back_threshold", self.load_back_threshold)
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
        check_pools(self)
        check_side(self)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """Read settings by name, with SGLang's spelling too. ConfigError names an unknown or wrong field."""
        given = {name: value for name, value in settings.items() if name != "engine_type"}
        for name, ours in SGLANG_NAMES.items():
            if name not in given:
                continue
            if given.get(ours) is not None:
                raise ConfigError(f"{name}: {ours} names the same setting; give one")
            given[ours] = given.pop(name)
            if name == "max_total_tokens":
                given[ours] = _count_pages(given[ours], given.get("block_size", 1))
        apart = {name: given.pop(name) for name in MockerSettings.__struct_fields__ if name in given}
        known = [name for name in cls.__struct_fields__ if name not in ("mocker", "tiers")]
        refuse_unknown(given, [*known, *SGLANG_NAMES, *MockerSettings.__struct_fields__])
        mocker = read_as(MockerSettings, apart, "engine")
        return msgspec.structs.replace(read_as(cls, given, "engine"), mocker=mocker)

    def core_config(
        self, plan: TierPlan | None, max_blocks: int, *, events: bool = False, kv_trace: bool = False
    ) -> SglangEngineConfig:
        """Build the core's form of these settings, as `EngineConfig.core_config` describes."""
        if kv_trace:
            raise ConfigError("kv_trace: SGLang engines keep no trace of blocks; leave it out")
        if plan is not None:
            self.check_tiers(plan)
        settings = self._core_settings(None if plan is None else plan.host_blocks(max_blocks))
        return SglangEngineConfig(settings, events=events, route_rejected=self.mocker.route_rejected)

    def live_config(
        self,
        *,
        events: bool = False,
        check: bool = False,
        stay_sample: float = 0.0,
        tiers: TierConfig | None = None,
        offload: VllmOffload | None = None,
    ) -> SglangEngineConfig:
        """Build the core's form for a live engine. ConfigError for what only vLLM's has."""
        if stay_sample > 0 or offload is not None:
            raise ConfigError(
                "kv_cache_metrics, offload: a live vLLM engine has them; leave them out with engine sglang"
            )
        settings = self._core_settings(None if tiers is None else tiers.g2_blocks)
        return SglangEngineConfig(settings, events=events, check=check)

    def _core_settings(self, host_blocks: int | None) -> SglangSettings:
        """Build the scheduler's settings; with `host_blocks` it has a host cache of so many pages."""
        settings = SglangSettings()
        for name in _OWN:
            setattr(settings, name, getattr(self, name))
        settings.page_size = self.block_size
        settings.max_total_num_tokens = self.num_gpu_blocks * self.block_size
        if self.max_model_len is not None:
            settings.context_len = self.max_model_len
        settings.max_running_requests = self.max_num_seqs or _most_requests(settings)
        settings.overlap = not self.disable_overlap_schedule
        settings.set_names(**{name: getattr(self, name) for name in _NAMES}, tree="unified")
        set_pools(settings, self)
        set_side(settings, self)
        if host_blocks is not None:
            settings.set_host(
                hicache_write_policy=self.hicache_write_policy,
                hicache_ratio=2.0,
                load_back_threshold=self.load_back_threshold,
                tokens=host_blocks * self.block_size,
            )
        return settings

    def core_side(
        self,
        config: CoreConfig,
        role: str,
        transfer: VllmTransfer,  # noqa: ARG002
    ) -> SglangEngineConfig:
        """Return the core's form of a prefill or decode server; ConfigError for what is not simulated there."""
        if self.swa_window is not None or self.max_mamba_cache_size is not None:
            name = "max_mamba_cache_size" if self.swa_window is None else "swa_window"
            raise ConfigError(
                f"{name}: windows or states with prefill and decode workers are not simulated; leave one of them out"
            )
        assert isinstance(config, SglangEngineConfig)
        return with_role(config, role)

    def count_blocks(self, engine: Engine, tiers: Sequence[str]) -> dict[str, BlockCounts]:
        """Count the pages of the pool, and of the host cache."""
        if not isinstance(engine, SglangEngine):
            return super().count_blocks(engine, tiers)
        tokens, size = engine.tokens, self.block_size
        active = engine.snapshot().active_blocks
        counts = {"device": BlockCounts(tokens.available // size, active, tokens.evictable // size)}
        if "g2" in tiers:
            used = tokens.host_used // size
            counts["g2"] = BlockCounts(tokens.host_total // size - used, 0, used)
        return counts

    def check_tiers(self, plan: TierPlan) -> None:
        """Raise ConfigError for tiers and options that HiCache lacks."""
        for planned in plan.tiers:
            if planned.tier is not Tier.G2:
                raise ConfigError(
                    f"{planned.tier.name.lower()}: SGLang's HiCache has no tier below the host here; leave it out"
                )
        if self.swa_window is not None or self.max_mamba_cache_size is not None:
            name = "max_mamba_cache_size" if self.swa_window is None else "swa_window"
            raise ConfigError(
                f"{name} contradicts g2: HiCache with windows or states is not simulated; give one"
            )
        if plan.offload != OffloadSettings():
            raise ConfigError(
                "offload: HiCache has its own rules; leave it out, and give hicache_write_policy"
            )
        if self.disable_radix_cache:
            raise ConfigError(
                "disable_radix_cache contradicts g2: HiCache is below the radix cache; give one"
            )

    @property
    def step_tokens(self) -> int:
        """Most prompt tokens of a step; 1 without a limit, as prompts are then never split."""
        return max(self.chunked_prefill_size, 1)

    @property
    def host_write_policy(self) -> str:
        """When the host cache gets pages."""
        return self.hicache_write_policy

    @property
    def caches_prefixes(self) -> bool:
        """Whether requests reuse cached prefixes of others."""
        return not self.disable_radix_cache

    @property
    def exact_pool_flags(self) -> str:
        """Name the flags that give the exact size of the KV pool, and the engine whose log has it."""
        return "--max-total-tokens and --page-size from SGLang's"

    @property
    def asynchronous(self) -> bool:
        """Whether the next batch is scheduled while this one runs."""
        return not self.disable_overlap_schedule


def _most_requests(settings: SglangSettings) -> int:
    """Return SGLang's own limit on running requests, where none is given."""
    return min(max(settings.max_total_num_tokens * 512 // settings.context_len, 2048), 4096)


def _count_pages(tokens: object, page_size: object) -> object:
    """Convert a pool's tokens into pages; values of a wrong type stay as they are, to be refused by name."""
    if not isinstance(tokens, int) or not isinstance(page_size, int) or page_size < 1:
        return tokens
    if tokens % page_size:
        raise ConfigError(f"max_total_tokens={tokens} is not a multiple of page_size={page_size}; round it")
    return tokens // page_size

"""Settings of a simulated TensorRT-LLM engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec

from understudy._core import TrtEngineConfig, TrtSettings
from understudy.checks import read_as, whole_number
from understudy.defaults import Default, is_default
from understudy.engines.engine_config import EngineConfig
from understudy.engines.mocker_names import refuse_unknown
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.trtllm_memory import plan_pool, set_pages
from understudy.engines.trtllm_options import read_options
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy._core import TierConfig, VllmOffload
    from understudy.tiers.plan import TierPlan

_DEFAULT_POOL = 2**20
"""Tokens of the KV cache where nothing sizes it."""
_LONGEST = 2**17
"""Most tokens of a request where `max_seq_len` is not given."""


class TrtllmConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of TensorRT-LLM 1.3.0rc25's PyTorch backend with KV cache manager V2, with its names and defaults.

    `block_size` is its `tokens_per_block`, `max_num_seqs` its `max_batch_size`, `max_num_batched_tokens` its
    `max_num_tokens`, `max_model_len` its `max_seq_len`; `from_dict` reads both spellings, and the keys of
    `kv_cache_config` and `scheduler_config` as users write them. `num_gpu_blocks` counts the pages of the device, which
    are rounded up to whole grains of memory.

    Errors: ConfigError names the wrong field, or what is not simulated.

    Example:
        engine = us.TrtllmConfig(enable_chunked_prefill=True, host_cache_size=0)
        report = us.replay("trace.jsonl", engine)
    """

    block_size: int = 32
    """Tokens of a block."""
    num_gpu_blocks: int = -1
    """Pages of the device, of all windows together; -1: 2^20 tokens of full attention."""
    max_num_seqs: int | None = 2048
    """Most active requests."""
    max_num_batched_tokens: int | None = 8192
    """Most tokens of a pass."""
    enable_chunked_prefill: bool = False
    """Split prompts that exceed the tokens of a pass; without it they are refused."""
    disable_overlap_scheduler: bool = False
    """Form a batch only when the one before has its results."""
    enable_prefix_aware_scheduling: bool = True
    """Count tokens of a prompt against the budget after reuse."""
    enable_partial_reuse: bool = True
    """Reuse the beginning of a block."""
    block_reuse_policy: Literal["all_reusable", "per_request"] = "all_reusable"
    """Which blocks are kept: all, or the ends of prompts."""
    use_kv_cache_manager_v2: bool | Literal["auto"] = "auto"
    """Run on KV cache manager V2; auto: as the class of the model decides. Manager V1 (False) is refused."""
    free_gpu_memory_fraction: float = 0.9
    """Share for the KV cache of the memory that weights and activations leave, where a GPU sizes it."""
    max_util_for_resume: float = 0.95
    """Used share of the device above which no request is resumed."""
    host_cache_size: int | None = None
    """Bytes of the host level; None: as large as the device's."""
    disk_cache_size: int = 0
    """Bytes of the disk level."""
    host_gbps: float = 50.0
    """Bandwidth between device and host in GB/s; copies delay the batch of their pass."""
    disk_gbps: float = 5.0
    """Bandwidth of the disk in GB/s."""
    num_layers: int = 1
    """Layers with a KV cache."""
    layer_kv_bytes: int = 65536
    """Bytes of keys and values of a token in a layer."""
    max_attention_window: tuple[int, ...] = ()
    """Windows in tokens, repeated over the layers; empty: full attention."""
    avg_seq_len: int | None = None
    """Length of requests by which pools of several windows are sized."""
    pool_ratio: tuple[float, ...] = ()
    """Shares of the pools of several windows; empty: by `avg_seq_len`, or TensorRT-LLM's typical request."""
    enable_swa_scratch_reuse: bool = False
    """Blocks that leave a window within a chunk have no pages of their own."""
    batch_wait_timeout_iters: int = 0
    """Most passes for which prompts wait for more of them."""
    batch_wait_max_tokens_ratio: float = 0.0
    """Share of the tokens of a pass from which prompts wait no more."""
    waiting_queue_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order in which requests become active: arrival, or higher priority first."""
    event_buffer_max_size: int = 0
    """Most KV events that a live server keeps until `/kv_cache_events` is read; 0: none."""
    kv_cache_event_hash_algo: Literal["auto", "v1_block_key", "v2_sha256", "v2_sha256_64"] = "auto"
    """Names of blocks in these events; auto: `v1_block_key`."""
    enable_iter_perf_stats: bool = False
    """A live server shows iteration statistics on `/metrics`."""
    iter_stats_max_iterations: int | None = None
    """Most of them that are kept between two readings; None: 1000; -1: all."""
    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"] = (
        "GUARANTEED_NO_EVICT"
    )
    """The scheduler of manager V2 follows MAX_UTILIZATION whatever it says, with a warning."""
    trtllm_version: Literal["1.3.0rc25"] = "1.3.0rc25"
    """Release to simulate."""

    def __post_init__(self) -> None:
        if self.num_gpu_blocks == -1:
            pages = max(_DEFAULT_POOL // max(self.block_size, 1), 1)
            msgspec.structs.force_setattr(self, "num_gpu_blocks", Default(pages))
        EngineConfig.__post_init__(self)
        if self.mocker.aic_nextn is not None:
            raise ConfigError(
                "aic_nextn contradicts engine trtllm, whose speculation is not simulated; leave it out"
            )
        self._check_limits(("num_layers", "layer_kv_bytes", "avg_seq_len"))
        for name in ("batch_wait_timeout_iters", "event_buffer_max_size"):
            whole_number(name, getattr(self, name))
        for name in ("host_cache_size", "disk_cache_size"):
            if (value := getattr(self, name)) is not None:
                whole_number(name, value)
        if self.use_kv_cache_manager_v2 not in (True, "auto"):
            raise ConfigError(
                f"use_kv_cache_manager_v2: {self.use_kv_cache_manager_v2!r} asks for the C++ manager V1, which is not "
                "simulated; give true"
            )
        for name in ("max_util_for_resume", "free_gpu_memory_fraction"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        if not 0 <= self.batch_wait_max_tokens_ratio <= 1:
            raise ConfigError(
                f"batch_wait_max_tokens_ratio must be from 0 to 1, got {self.batch_wait_max_tokens_ratio}"
            )
        for name in ("host_gbps", "disk_gbps"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} must be a finite number above 0, got {getattr(self, name)}")
        for window in self.max_attention_window:
            whole_number("max_attention_window", window, 1)
        self._count_pages()

    def _count_pages(self) -> None:
        """Set the number of pages that the memory holds. ConfigError if no prompt could ever be scheduled."""
        settings = self._core_settings()
        pages = plan_pool(settings).pages
        msgspec.structs.force_setattr(
            self, "num_gpu_blocks", Default(pages) if is_default(self.num_gpu_blocks) else pages
        )
        if self.enable_chunked_prefill and settings.max_num_tokens < settings.chunk_unit:
            raise ConfigError(
                f"max_num_tokens={settings.max_num_tokens} is below the unit of chunks, {settings.chunk_unit}: no "
                "prompt would ever be scheduled; raise it, or turn enable_chunked_prefill off"
            )

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """Read settings by name, or as `extra_llm_api_options` has them. ConfigError names a wrong field."""
        given = read_options({name: value for name, value in settings.items() if name != "engine_type"})
        sizes = {name: given.pop(name) for name in ("max_tokens", "max_gpu_total_bytes") if name in given}
        apart = {name: given.pop(name) for name in MockerSettings.__struct_fields__ if name in given}
        known = [name for name in cls.__struct_fields__ if name not in ("mocker", "tiers")]
        refuse_unknown(given, [*known, *sizes, *MockerSettings.__struct_fields__])
        mocker = read_as(MockerSettings, apart, "engine")
        for name, size in sizes.items():
            whole_number(name, size, 1)
            if given.get("num_gpu_blocks") is not None:
                raise ConfigError(f"{name}: num_gpu_blocks names the same memory; give one")
        read = msgspec.structs.replace(read_as(cls, given, "engine"), mocker=mocker)
        return read.with_memory(**sizes) if sizes else read

    def with_memory(self, *, max_tokens: int | None = None, max_gpu_total_bytes: int | None = None) -> Self:
        """Size the pools by tokens or bytes of the device, the smaller of both."""
        settings = self._core_settings()
        settings.max_tokens, settings.max_gpu_total_bytes = max_tokens, max_gpu_total_bytes
        pages, longest, quota = plan_pool(settings)
        return msgspec.structs.replace(
            self,
            num_gpu_blocks=pages,
            max_model_len=longest if max_tokens is not None else self.max_model_len,
            host_cache_size=quota if self.host_cache_size is None else self.host_cache_size,
        )

    def core_config(
        self, plan: TierPlan | None, max_blocks: int, *, events: bool = False, kv_trace: bool = False
    ) -> TrtEngineConfig:
        """Build the core's form of these settings, as `EngineConfig.core_config` describes."""
        if kv_trace:
            raise ConfigError("kv_trace: TensorRT-LLM engines keep no trace of blocks; leave it out")
        del max_blocks  # for unlimited tiers, which its levels are not
        if plan is not None:
            self.check_tiers(plan)
        return self._build(events=events, check=False)

    def live_config(
        self,
        *,
        events: bool = False,
        check: bool = False,
        stay_sample: float = 0.0,
        tiers: TierConfig | None = None,
        offload: VllmOffload | None = None,
    ) -> TrtEngineConfig:
        """Build the core's form for a live engine. ConfigError for what only vLLM's has."""
        if stay_sample > 0 or offload is not None or tiers is not None:
            raise ConfigError(
                "kv_cache_metrics, offload, tiers: a live vLLM engine has them; leave them out with engine trtllm"
            )
        return self._build(events=events, check=check, is_live=True)

    def _build(self, *, events: bool, check: bool, is_live: bool = False) -> TrtEngineConfig:
        return TrtEngineConfig(
            self._core_settings(),
            events=events,
            check=check,
            host_gbps=self.host_gbps,
            disk_gbps=self.disk_gbps,
            event_buffer_size=self.event_buffer_max_size if is_live else 0,
            dies=is_live,
        )

    def _core_settings(self) -> TrtSettings:
        """Build the executor's settings; the pages of the device are given as bytes."""
        settings = TrtSettings()
        settings.tokens_per_block = self.block_size
        settings.max_batch_size = self.max_num_seqs or 2048
        settings.max_num_tokens = self.max_num_batched_tokens or 8192
        settings.max_seq_len = self.max_model_len or _LONGEST
        settings.overlap = not self.disable_overlap_scheduler
        settings.enable_block_reuse = self.enable_prefix_caching
        settings.layer_bytes_per_token = self.layer_kv_bytes
        for name in _OWN:
            setattr(settings, name, getattr(self, name))
        settings.set_names(
            reuse_policy=self.block_reuse_policy, waiting_queue_policy=self.waiting_queue_policy
        )
        set_pages(settings, self.num_gpu_blocks)
        return settings

    def check_tiers(self, plan: TierPlan) -> None:
        """Raise ConfigError: its levels below the device are settings of its own."""
        names = ", ".join(planned.tier.name.lower() for planned in plan.tiers)
        raise ConfigError(
            f"{names}: TensorRT-LLM has levels of its own; give host_cache_size and disk_cache_size"
        )

    @property
    def longest_sequence(self) -> int:
        """Most tokens of a request that the device holds, prompt and output."""
        return plan_pool(self._core_settings()).longest

    @property
    def caches_prefixes(self) -> bool:
        """Whether requests reuse cached prefixes of others."""
        return self.enable_prefix_caching

    @property
    def exact_pool_flags(self) -> str:
        """Name the flags that give the exact size of the KV pool, and the engine whose log has it."""
        return "--kv_cache_max_tokens and --tokens_per_block from TensorRT-LLM's"

    @property
    def asynchronous(self) -> bool:
        """Whether the next batch is scheduled while this one runs."""
        return not self.disable_overlap_scheduler

    def notes(self, *, own_times: bool = False) -> list[str]:
        """Return notes on what the run only assumes."""
        del own_times
        if self.capacity_scheduler_policy == "MAX_UTILIZATION":
            return []
        return [
            "KV cache manager V2 schedules by MAX_UTILIZATION whatever capacity_scheduler_policy says: requests are "
            "suspended and computed again when memory is short."
        ]


_OWN = (
    *(
        "enable_chunked_prefill",
        "enable_prefix_aware_scheduling",
        "enable_partial_reuse",
        "max_util_for_resume",
    ),
    *(
        "host_cache_size",
        "disk_cache_size",
        "num_layers",
        "max_attention_window",
        "avg_seq_len",
        "pool_ratio",
    ),
    *("enable_swa_scratch_reuse", "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio"),
)
"""Settings that the core has by the same name."""

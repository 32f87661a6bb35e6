"""Settings that engines of every kind have, and how a kind makes its form for the core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgspec
import numpy as np

from understudy._core import StepTiming, python_timing
from understudy.checks import read_as, whole_number
from understudy.defaults import (
    BLOCK_SIZE,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    NUM_GPU_BLOCKS,
    STATIC_SHARE,
    is_default,
)
from understudy.engines.block_counts import BlockCounts
from understudy.engines.mocker_names import refuse_unknown
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.profiles import NEWEST, VersionProfile, find_profile
from understudy.engines.timing import Polynomial, Timing, TimingModel
from understudy.errors import ConfigError
from understudy.tiers.settings import TiersConfig, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Self

    from understudy import _core
    from understudy._core import EngineConfig as CoreConfig
    from understudy._core import GroupLayout, VllmOffload, VllmTransfer
    from understudy.defaults import BatchLimits
    from understudy.engines.interface import Engine
    from understudy.engines.kv_groups import KvCacheGroup
    from understudy.engines.speculation import SpeculativeConfig
    from understudy.tiers.gpu import GpuSettings
    from understudy.tiers.plan import TierPlan

_MOST = {"block_size": 2**20, "num_gpu_blocks": 2**30}
_LIMITS = (
    "block_size",
    "num_gpu_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "data_parallel_size",
)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a worker's engine. Each kind of engine derives a class, adds settings and defines `core_config`.

    `num_gpu_blocks` counts usable blocks.
    """

    block_size: int = BLOCK_SIZE
    """Tokens per KV block; not given: what vLLM chooses for the model."""
    num_gpu_blocks: int = NUM_GPU_BLOCKS
    """Usable KV blocks of a worker; not given: as many as fit on its GPU."""
    max_num_seqs: int | None = MAX_NUM_SEQS
    """Most running requests; not given: what vLLM chooses for the GPU; None: no limit."""
    max_num_batched_tokens: int | None = MAX_NUM_BATCHED_TOKENS
    """Most tokens per step; not given: what vLLM chooses for the GPU; None: no limit."""
    max_model_len: int | None = None
    """Most tokens of a request, prompt and output; None: no limit."""
    enable_prefix_caching: bool = True
    """Whether requests reuse cached blocks of equal prefixes."""
    data_parallel_size: int = 1
    """Data-parallel ranks of an engine, each with all these blocks; a run numbers each as a worker."""
    timing: Timing = Polynomial()
    """Model of step times; the default is generic, not that of a GPU."""
    mocker: MockerSettings = MockerSettings()
    """Settings that imitate Dynamo's mocker; by name they are among the engine's settings."""
    tiers: TiersConfig = TiersConfig()
    """Tiers from Dynamo's names among the engine's settings."""

    def __post_init__(self) -> None:
        timing: Any = self.timing
        if not isinstance(timing, Timing):
            kinds = ", ".join(kind.__name__ for kind in get_args(Timing))
            raise ConfigError(
                f"timing must be one of {kinds}, got {timing!r}; pass a user-defined model to understudy.replay"
            )
        if not isinstance(self.mocker, MockerSettings):
            raise ConfigError(f"mocker must be MockerSettings, got {self.mocker!r}")
        self._check_limits(_LIMITS)
        self._check_switches(("enable_prefix_caching",))

    def _check_limits(self, fields: Iterable[str]) -> None:
        for field in fields:
            if (value := getattr(self, field)) is not None:
                checked = whole_number(field, value, 1, _MOST.get(field))
                if not is_default(value):
                    msgspec.structs.force_setattr(self, field, checked)

    def _check_switches(self, fields: Iterable[str], *, optional: bool = False) -> None:
        for field in fields:
            value = getattr(self, field)
            if isinstance(value, np.bool_):
                msgspec.structs.force_setattr(self, field, bool(value))
            elif not isinstance(value, bool) and (value is not None or not optional):
                raise ConfigError(f"{field} must be True or False, got {value!r}")

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """Read settings by name. ConfigError names an unknown, wrong or not yet supported field."""
        given = {name: value for name, value in settings.items() if name != "engine_type"}
        apart = {name: given.pop(name) for name in MockerSettings.__struct_fields__ if name in given}
        known = [name for name in cls.__struct_fields__ if name not in ("mocker", "tiers")]
        refuse_unknown(given, [*known, *MockerSettings.__struct_fields__])
        mocker = read_as(MockerSettings, apart, "engine")
        return msgspec.structs.replace(read_as(cls, given, "engine"), mocker=mocker)

    def core_config(
        self, plan: TierPlan | None, max_blocks: int, *, events: bool = False, kv_trace: bool = False
    ) -> _core.EngineConfig:
        """Build the core's form of these settings, which makes the engine.

        `plan` are the tiers of the worker, whose unlimited ones have `max_blocks`; `events` and `kv_trace` keep events
        and trace records until they are taken. ConfigError names a setting that contradicts the tiers.
        """
        raise NotImplementedError

    def core_side(self, config: CoreConfig, role: str, transfer: VllmTransfer) -> CoreConfig:  # noqa: ARG002
        """Return the core's form of a worker that is one side of hand-offs. ConfigError: the kind has none."""
        raise ConfigError(
            f"pools: {type(self).__name__} with role {role} is not simulated; leave the role out"
        )

    def choose_defaults(self, gpu: GpuSettings, model: str | None) -> Self:  # noqa: ARG002
        """Replace settings that were not given by those that the engine chooses for the model on this GPU."""
        return self

    def choose_limits(self, limits: BatchLimits) -> Self:  # noqa: ARG002
        """Replace limits of a step that were not given by `limits`, if the engine takes them from its GPU."""
        return self

    def drop_unused_group_settings(self) -> Self:
        """Return these settings; without those of KV cache groups if it has none."""
        return self

    def check_tiers(self, plan: TierPlan) -> None:
        """Raise ConfigError for tiers and offload options that such an engine does not have."""

    def build_live_offload(self, tiers: TiersConfig, max_blocks: int) -> VllmOffload | None:  # noqa: ARG002
        """Build the offload that is part of the engine itself, if the tiers of a live engine ask for one."""
        return None

    def live_config(
        self,
        *,
        events: bool = False,
        check: bool = False,
        stay_sample: float = 0.0,
        tiers: _core.TierConfig | None = None,
        offload: VllmOffload | None = None,
    ) -> _core.EngineConfig:
        """Build the core's form for a live engine. ConfigError for what such engines do not have.

        `check` verifies blocks and events after every step; residence times are measured for the share `stay_sample`
        of blocks.
        """
        if tiers is not None or check or stay_sample > 0 or offload is not None:
            raise ConfigError(
                "tiers, check and kv_cache_metrics: a live vLLM engine has them; leave them out"
            )
        return self.core_config(None, 0, events=events)

    def count_blocks(self, engine: Engine, tiers: Sequence[str]) -> dict[str, BlockCounts]:  # noqa: ARG002
        """Count the blocks of a live engine on its device and on these tiers, by the tier's name."""
        now = engine.snapshot()
        return {"device": BlockCounts(self.num_gpu_blocks - now.active_blocks, now.active_blocks, 0)}

    def native_timing(self, model: TimingModel | None = None) -> StepTiming:
        """Build the timing model, or wrap the given Python one, with the mocker's settings."""
        built = self._add_drafter(self.timing.build()) if model is None else python_timing(model)
        return self.mocker.native().apply_to(built)

    def _add_drafter(self, timing: StepTiming) -> StepTiming:
        """Add the time of a drafter to every step, if the engine has one."""
        return timing

    def describe(self) -> dict[str, Any]:
        """Return the engine's settings without tiers, as JSON values; the mocker's are among them."""
        alone = msgspec.structs.replace(self, tiers=TiersConfig())
        described: dict[str, Any] = msgspec.to_builtins(alone, enc_hook=name_of)
        del described["tiers"]
        described["timing"].pop("basis", None)
        mocker = described.pop("mocker")
        if not mocker["route_rejected"]:
            del mocker["route_rejected"]
        return {**described, **mocker}

    def notes(self, *, own_times: bool = False) -> list[str]:  # noqa: ARG002
        """Return notes for the report where a run only approximates the real engine, or assumes something.

        `own_times`: a user-defined timing model replaces `timing`.
        """
        return []

    def check_recordable(self) -> None:
        """Raise ConfigError if the steps of such an engine cannot be recorded."""
        raise ConfigError(
            f"record_steps: {type(self).__name__} engines record no steps; leave record_steps out"
        )

    @property
    def kv_cache_groups(self) -> tuple[KvCacheGroup, ...]:
        """Groups of layers that keep different kinds of KV; empty: one group of full attention."""
        return ()

    @property
    def prefix_cache_retention_interval(self) -> int | None:
        """Tokens between cached blocks of windows and states; 0: only ends of prompts; None: every block."""
        return 0

    @property
    def prefix_match_unit(self) -> int | None:
        """Unit of hashing in tokens; None: as the KV cache groups allow."""
        return None

    @property
    def speculative_config(self) -> SpeculativeConfig | None:
        """Speculative decoding; None: off."""
        return None

    @property
    def group_layout(self) -> GroupLayout | None:
        """Sizes of the KV cache groups; None without them."""
        return None

    @property
    def host_write_policy(self) -> str:
        """When the engine's own host cache gets pages; empty: it has none."""
        return ""

    @property
    def caches_prefixes(self) -> bool:
        """Whether requests reuse cached prefixes of others."""
        return self.enable_prefix_caching

    @property
    def accepts_adapters(self) -> bool:
        """Whether requests may name LoRA adapters."""
        return False

    @property
    def orders_by_name(self) -> bool:
        """Whether names of requests break ties in scheduling order."""
        return False

    @property
    def has_user_policy(self) -> bool:
        """Whether a user-defined policy chooses the device blocks to evict."""
        return False

    @property
    def exact_pool_flags(self) -> str:
        """Name the flags that give the exact size of the KV pool, and the engine whose log has it."""
        return "--num-gpu-blocks and --block-size from vLLM's"

    @property
    def asynchronous(self) -> bool:
        """Whether the next batch is scheduled while this one runs."""
        return False

    @property
    def draft_tokens(self) -> int:
        """Number of tokens that speculation drafts per step."""
        return 0

    @property
    def num_stages(self) -> int:
        """Number of stages of its pipeline; 1: none."""
        return 1

    @property
    def profile(self) -> VersionProfile:
        """Rules of the vLLM release whose front end chooses among data-parallel ranks."""
        return find_profile(NEWEST)

    @property
    def step_tokens(self) -> int | None:
        """Most tokens of a step; None: no limit."""
        return self.max_num_batched_tokens

    @property
    def memory_share(self) -> float:
        """Share of a GPU's memory that the engine takes unless one is given."""
        return STATIC_SHARE

    @classmethod
    def find_memory_share(cls, release: str) -> float:  # noqa: ARG003
        """Return the share of a GPU's memory that a release takes unless one is given; any name may be asked for."""
        return STATIC_SHARE


def describe_scheduling(engines: Iterable[EngineConfig]) -> str:
    """Describe how these engines schedule: asynchronous, synchronous, or both."""
    modes = {"asynchronous" if engine.asynchronous else "synchronous" for engine in engines}
    return " and ".join(sorted(modes))

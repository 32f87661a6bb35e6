"""`EngineKind`: facts that hold for all engines of one kind and differ between kinds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from understudy.engines.kinds.terms import EngineTerms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.kinds.launch import LaunchCommand
    from understudy.tiers.gpu import GpuSettings


class PoolRules(Protocol):
    """Sets the pools of a model; returns the engine and notes for the report."""

    def __call__(
        self, gpu: GpuSettings, engine: Any, model: str, kv_dtype: str | None, *, has_blocks: bool
    ) -> tuple[Any, tuple[str, ...]]:
        """Size the pools, unless `has_blocks` says that settings give them. ConfigError: a model it cannot run."""


@dataclass(frozen=True, kw_only=True)
class EngineKind:
    """One kind of engine. What depends on the values of settings is a method of its `config_class` instead."""

    name: str
    """Name in `engine_type`, `--engine` and timing files."""
    title: str
    """Name in prose."""
    config_class: type[EngineConfig]
    """Class of the settings."""
    version_setting: str
    """Setting that names the release. Saved settings name their kind by it, as no other kind has it."""
    event_producer: Literal["vllm", "sglang"] = "vllm"
    """Engine whose KV events it sends, in the form of its own release if it is that engine."""
    has_kv_cache_groups: bool = False
    """Whether layers that keep different KV have groups of their own."""
    hands_off: bool = False
    """Whether prefill and decode workers of this kind hand KV blocks to each other."""
    pulls_blocks: bool = False
    """Whether they do it by vLLM's connector, which live servers have too."""
    has_cache_curves: bool = False
    """Whether studies of cache sizes replay its cache."""
    apply_pools: PoolRules | None = None
    """Divides a GPU's memory for a model by rules of this kind; None: blocks of one size."""
    pools_need_different_layers: bool = False
    """Whether those rules hold only for models whose layers keep different KV."""
    sizes_pool_in_tokens: bool = False
    """Whether its flags give the KV pool as tokens, so that the size of a block does not change the pool."""
    terms: EngineTerms = field(default_factory=EngineTerms)
    """Words and flags of reports."""
    measured_sources: tuple[str, ...] = ()
    """Sources of step times, by their first words, that were measured with this engine or with its kernels."""
    launch: LaunchCommand | None = None
    """How the real engine is started; None: sweeps print no command."""
    steps_apart: str | None = None
    """Why data-parallel ranks that share experts cannot step together; None: they can."""
    metrics: Literal["vllm", "sglang", "trtllm"] = "vllm"
    """Engine whose metric names its page has."""
    shortens_requests: bool = False
    """Whether its server shortens requests that its pool cannot hold, instead of refusing such a context at start."""
    answers_full_queue: bool = False
    """Whether a request that its queue limit refuses gets status 503, instead of an aborted answer."""
    without_cache: Mapping[str, bool] = field(default_factory=lambda: {"enable_prefix_caching": False})
    """Settings of an engine that reuses no prefixes."""
    runs_measured_rows: bool = True
    """Whether step times of measured rows were fitted with this engine's rules; else with those of the default kind."""
    last_token_switch: str | None = None
    """Setting that turns off the step which computes the last token of a finished request; None: no such step."""

    @property
    def speculates(self) -> bool:
        """Whether its engines can decode speculatively."""
        return "speculative_config" in self.config_class.__struct_fields__

    def version_of(self, engine: EngineConfig) -> str:
        """Return the release of an engine of this kind."""
        return str(getattr(engine, self.version_setting))

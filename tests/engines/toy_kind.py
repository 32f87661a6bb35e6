"""The kind of engine that runs the core's toy engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy import _core
from understudy.engines.engine_config import EngineConfig
from understudy.engines.kinds.kind import EngineKind
from understudy.engines.kinds.terms import EngineTerms
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.tiers.plan import TierPlan


class ToyConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the toy engine (core/tests/toy_engine.hpp)."""

    max_num_seqs: int | None = None
    """Not a setting of this engine: give `max_running`."""
    max_num_batched_tokens: int | None = None
    """Not a setting of this engine, whose steps have no limit."""
    max_running: int = 4
    """Most running requests."""
    queue_limit: int = 8
    """Most waiting requests; one more ends the oldest."""
    toy_version: str = "1"
    """Release; it names the kind in saved settings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_seqs is not None or self.max_num_batched_tokens is not None:
            raise ConfigError(
                "max_num_seqs, max_num_batched_tokens: no settings of a toy engine; give max_running"
            )

    def core_config(
        self, plan: TierPlan | None, max_blocks: int, *, events: bool = False, kv_trace: bool = False
    ) -> _core.EngineConfig:
        """Build the core's form. ConfigError: the toy engine has no tiers and keeps no trace."""
        if kv_trace or plan is not None:
            raise ConfigError(
                f"ToyConfig has neither tiers (of {max_blocks:,} blocks) nor kv_trace; leave both out"
            )
        return _core.ToyEngineConfig(
            block_size=self.block_size,
            num_gpu_blocks=self.num_gpu_blocks,
            max_running=self.max_running,
            queue_limit=self.queue_limit,
            events=events,
        )


KIND = EngineKind(
    name="toy",
    title="Toy",
    config_class=ToyConfig,
    version_setting="toy_version",
    terms=EngineTerms(
        requests="--set engine.max_running",
        requests_setting="max_running",
        block="brick",
        more_memory="more bricks",
        requeued="returns",
        usage="Brick usage",
    ),
)

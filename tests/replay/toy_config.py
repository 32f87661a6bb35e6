"""The toy engine as a kind of engine, for tests of what runs and servers accept of any kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy import _core
from understudy.engines.engine_config import EngineConfig
from understudy.engines.kinds.kind import EngineKind
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.tiers.plan import TierPlan


class ToyConfig(EngineConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the toy engine (core/tests/toy_engine.hpp)."""

    max_running: int = 4
    queue_limit: int = 8
    toy_version: str = "1"

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


KIND = EngineKind(name="toy", title="Toy", config_class=ToyConfig, version_setting="toy_version")

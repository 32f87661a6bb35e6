"""A small engine with tiers, replayed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig

if TYPE_CHECKING:
    from understudy.run.timeline import Timeline
    from understudy.workload import Workload


ENGINE = VllmConfig(block_size=16, num_gpu_blocks=60)


def config(*tiers: dict[str, Any], **settings: Any) -> TiersConfig:
    given = tiers or ({"tier": "g2", "blocks": 400, "link": {"down_gbps": 25, "up_gbps": 25}},)
    return TiersConfig.from_dict({"tiers": list(given), "kv_bytes_per_token": 1024, **settings})


def played(workload: Workload, tiers: TiersConfig | None = None, **how: Any) -> Timeline:
    return run_offline(RunPlan(workload, ENGINE, tiers=tiers, check=True, **how)).timeline

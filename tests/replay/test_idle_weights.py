"""What a token weighs, given without a tier that would ask for it: refused from Python as from the command line."""

from __future__ import annotations

from typing import Any

import pytest

import understudy
from replay.building import crowd
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.online import replay_online
from understudy.run.offline import run_offline
from understudy.run.pools import WorkerPool
from understudy.run.run_plan import RunPlan
from understudy.run.settings import ReplaySettings
from understudy.tiers import TiersConfig

ENGINE = VllmConfig(block_size=16, num_gpu_blocks=60)


@pytest.mark.parametrize(
    ("weight", "field"),
    [({"model": "Qwen3-8B"}, "model"), ({"kv_bytes_per_token": 5}, "kv_bytes_per_token")],
)
def test_a_weight_without_a_tier_is_refused_by_its_field(weight: dict[str, Any], field: str) -> None:
    idle = TiersConfig(**weight)
    says = f"tiers: {field} gives the KV bytes per token in a tier, and there is none; add one"
    with pytest.raises(ConfigError, match=says):
        understudy.replay(crowd(), ENGINE, tiers=idle)
    with pytest.raises(ConfigError, match=says):
        run_offline(
            RunPlan(crowd(), pools=[WorkerPool(engine=ENGINE), WorkerPool(engine=ENGINE, tiers=idle)])
        )
    with pytest.raises(ConfigError, match=says):
        replay_online(crowd(), "crowd", ENGINE, tiers=idle)


def test_settings_without_tiers_keep_no_weight_that_a_run_would_refuse() -> None:
    for lines in (["gpu.name=H100"], ["tiers=[]"]):
        settings = ReplaySettings.read(None, {}, ["model=Qwen3-8B", *lines])
        assert settings.tiers == TiersConfig()
    kept = ReplaySettings.read(None, {}, ["model=Qwen3-8B", "gpu.name=H100", "tiers.g2.blocks=5"])
    assert kept.tiers.model == "Qwen3-8B"
    pools = ReplaySettings.read(None, {}, ["pools=[{model: Qwen3-8B, tiers: []}]"]).pools
    run_offline(RunPlan(crowd(), pools=pools))

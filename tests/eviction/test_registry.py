"""One list of built-in eviction policies: what the core knows by name, the type checker knows, and every pool takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from replay.building import single_turns
from understudy.core_types import PolicyName
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.kv import BUILT_IN_POLICIES, BlockManager
from understudy.kv.kv_manager import KvManager
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TierSettings

ROOT = Path(__file__).parents[2]


def test_the_core_knows_exactly_these() -> None:
    with pytest.raises(ConfigError, match=r"is not known; choose one of (.*), or pass") as refused:
        BlockManager(4, policy="magic")  # type: ignore[arg-type]
    listed = re.search("choose one of (.*), or pass", str(refused.value))
    assert listed is not None
    assert tuple(listed[1].split(", ")) == BUILT_IN_POLICIES


def test_the_type_checker_knows_the_same() -> None:
    assert get_args(PolicyName) == BUILT_IN_POLICIES


@pytest.mark.parametrize("name", BUILT_IN_POLICIES)
def test_each_serves_the_manager_a_tier_and_the_simulated_device(name: str) -> None:
    manager = BlockManager(4, policy=name)  # type: ignore[arg-type]
    manager.allocate(4).release()
    assert TierSettings(tier="g2", blocks=1, eviction=name).eviction == name
    assert KvManager(4, 16, eviction=name).free_blocks == 4  # type: ignore[arg-type]
    for kv_manager in ("native", "kvbm"):
        config = VllmConfig(
            block_size=16,
            num_gpu_blocks=8,
            kv_manager=kv_manager,
            eviction_policy=name,
        )
        timeline = run_offline(RunPlan(single_turns([64, 64, 64], 40), config, check=True)).timeline
        assert timeline.evictions > 0


def test_every_place_that_contributing_lists_names_each_of_them() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = guide.split("### In C++")[1].split("\n## ")[0]
    steps = section.split("`tests/eviction/test_registry.py`")[0]
    places = set(re.findall(r"`([\w/]+\.(?:hpp|cpp|py|pyi|md))`", steps))
    assert "src/understudy/kv/policy.py" in places
    examples = {"core/eviction/free_then_cached.hpp", "core/eviction/lists.hpp", "core/eviction/vllm.hpp"}
    for place in sorted(places - examples):
        text = (ROOT / place).read_text(encoding="utf-8")
        for name in BUILT_IN_POLICIES:
            kind = "".join(word.capitalize() for word in name.split("_"))
            assert re.search(rf"\b({name}|{kind})\b", text), f"{place} does not know {name}"

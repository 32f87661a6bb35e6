"""One list of built-in eviction policies: what the core knows by name, the stub says and every tier takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import understudy
from understudy.engines.config import VllmConfig
from understudy.errors import ConfigError
from understudy.kv import BUILT_IN_POLICIES, BlockManager
from understudy.tiers.settings import TierSettings

STUB = Path(understudy.__file__).with_name("_core.pyi")


def test_the_core_knows_exactly_these() -> None:
    with pytest.raises(ConfigError, match=r"is not known; choose one of (.*), or pass") as refused:
        BlockManager(4, policy="magic")  # type: ignore[arg-type]
    listed = re.search("choose one of (.*), or pass", str(refused.value))
    assert listed is not None
    assert tuple(listed[1].split(", ")) == BUILT_IN_POLICIES


def test_the_stub_says_the_same() -> None:
    alias = re.search(
        r"^PolicyName: TypeAlias = Literal\[(.*)\]$", STUB.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert alias is not None
    assert tuple(re.findall(r'"(\w+)"', alias[1])) == BUILT_IN_POLICIES


@pytest.mark.parametrize("name", BUILT_IN_POLICIES)
def test_each_serves_the_manager_and_a_tier(name: str) -> None:
    manager = BlockManager(4, policy=name)  # type: ignore[arg-type]
    manager.allocate(4).release()
    assert TierSettings(tier="g2", blocks=1, eviction=name).eviction == name


def test_the_simulated_pool_takes_some_of_them() -> None:
    choices = get_args(get_args(get_type_hints(VllmConfig)["eviction_policy"])[0])
    assert set(choices) <= set(BUILT_IN_POLICIES)

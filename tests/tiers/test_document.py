"""The examples of docs/tiers.md are what the code takes and prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from understudy.tiers import LinkSettings, OffloadSettings, TierPlan, TiersConfig, TierSettings

if TYPE_CHECKING:
    import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()


def fenced(language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert isinstance(block, str)
    return block


def test_the_example_of_a_configuration_resolves() -> None:
    settings: dict[str, Any] = yaml.safe_load(fenced("yaml"))["tiers"]
    resolved = TierPlan.of(TiersConfig.from_dict(settings), 64)
    assert resolved is not None
    assert [tier.blocks for tier in resolved.tiers] == [65536, 476837, None]


def test_the_example_prints_what_its_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    code = fenced("python")
    exec(code, {})
    assert capsys.readouterr().out.split() == re.findall(r"# (\d+)", code)


def test_every_setting_is_explained() -> None:
    named = set(re.findall(r"`([a-z_.]+)`", TEXT))
    tier = {name for name in TierSettings.__struct_fields__ if name != "link"}
    link = {f"link.{name}" for name in LinkSettings.__struct_fields__}
    offload = {f"offload.{name}" for name in OffloadSettings.__struct_fields__}
    assert (tier | link | offload) - named == set()

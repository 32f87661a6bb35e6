"""The examples of docs/tiers.md are what the code takes and prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from understudy.cli import build_parser
from understudy.run.settings import ReplaySettings
from understudy.tiers import LinkSettings, OffloadSettings, TierPlan, TierSettings

TEXT = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()


def fenced(language: str) -> str:
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert isinstance(block, str)
    return block


def test_the_example_of_a_configuration_resolves(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(fenced("yaml"))
    settings = ReplaySettings.read(path, {}, [])
    resolved = TierPlan.of(settings.tiers, settings.engine.block_size)
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


def test_every_command_and_every_flag_of_tiers_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [line.split()[1:] for line in fenced("sh").splitlines()]
    assert len(commands) > 2
    for command in commands:
        build_parser().parse_args(command)
    with pytest.raises(SystemExit):
        build_parser().parse_args(["replay", "--help-all"])
    shown = set(re.findall(r"--[a-z0-9-]+", capsys.readouterr().out))
    assert set(re.findall(r"`(--[a-z0-9-]+)`", TEXT)) - shown == set()

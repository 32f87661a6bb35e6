"""A live fleet's decisions are in their file as soon as they are made."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from server.client import QUICK, Client
from server.fleet_scene import C
from understudy.cli.fleet import read_fleet
from understudy.errors import ConfigError
from understudy.fleets.decision_log import DecisionLog
from understudy.fleets.fleet import Fleet, FleetSettings
from understudy.server.settings import ServerSettings


def test_each_decision_is_a_line_while_the_fleet_runs(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"

    async def play() -> list[int]:
        pool = ServerSettings(model="stub", engine=QUICK, max_model_len=4096)
        fleet = Fleet(FleetSettings(pools=((2, pool),), base_port=0, port=0, routing="kv", decisions=path))
        await fleet.start()
        counts = []
        try:
            for number in range(3):
                await Client(fleet.port).post(C, {"prompt": [number] * 40, "max_tokens": 1})
                counts.append(len(path.read_text().splitlines()))
        finally:
            await fleet.stop()
            fleet.runtime.driver.stop()
        return counts

    assert asyncio.run(play()) == [1, 2, 3]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["n"] for line in lines] == [1, 2, 3]
    assert {line["worker"] for line in lines} <= {0, 1}
    assert all(line["tokens"] == 40 for line in lines)


def test_the_flag_names_the_file_and_one_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    settings, _ = read_fleet(["my-model", "--workers", "2", "--decisions", str(tmp_path / "x.jsonl")])
    assert settings.decisions == tmp_path / "x.jsonl"
    with pytest.raises(ConfigError, match=r"--decisions: .* cannot be written"):
        DecisionLog(tmp_path / "no" / "x.jsonl")


def test_a_full_disk_ends_the_log_and_not_the_fleet() -> None:
    log = DecisionLog(Path("/dev/full"))
    log.write({"n": 1})
    log.write({"n": 2})
    log.close()

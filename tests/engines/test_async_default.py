"""Which mode an engine schedules in: vLLM's own choice unless told otherwise, and the report says which."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from replay.building import MS, play, single_turns
from understudy.cli import main
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.profiles import PROFILES
from understudy.engines.speculation import SpeculativeConfig
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.report import Report
from understudy.run.offline import run_offline
from understudy.run.pools import WorkerPool
from understudy.run.run_plan import RunPlan
from understudy.server.flags.serving import read_serve
from understudy.server.settings import ServerSettings

if TYPE_CHECKING:
    from pathlib import Path

TEN_MS = Constant(prefill_ms=0.0, decode_ms=10.0)


def drafts(method: Any) -> SpeculativeConfig:
    return SpeculativeConfig(method=method, num_speculative_tokens=2)


@pytest.mark.parametrize("version", PROFILES)
def test_every_version_schedules_ahead_unless_told_otherwise(version: str) -> None:
    assert VllmConfig(vllm_version=version).asynchronous
    assert not VllmConfig(vllm_version=version, async_scheduling=False).asynchronous


@pytest.mark.parametrize(
    ("method", "version", "asynchronous"),
    [
        ("mtp", "0.18", True),
        ("eagle", "0.27", True),
        ("eagle3", "0.32", True),
        ("draft_model", "0.27", False),
        ("draft_model", "0.28", True),
        ("draft_model", "0.32", True),
        ("ngram", "0.32", False),
    ],
)
def test_with_speculation_it_depends_on_the_method_and_the_version(
    method: str, version: str, asynchronous: bool
) -> None:
    config = VllmConfig(vllm_version=version, speculative_config=drafts(method))
    assert config.asynchronous is asynchronous
    assert config.describe()["async_scheduling"] is asynchronous


def test_bursts_of_the_mocker_are_synchronous() -> None:
    assert not VllmConfig(mocker=MockerSettings(aic_nextn=2)).asynchronous


def test_ngram_cannot_be_told_to_schedule_ahead() -> None:
    with pytest.raises(ConfigError, match="async_scheduling contradicts method ngram"):
        VllmConfig(async_scheduling=True, speculative_config=drafts("ngram"))
    assert VllmConfig(
        vllm_version="0.27", async_scheduling=True, speculative_config=drafts("draft_model")
    ).asynchronous


def test_a_request_that_arrives_in_the_middle_of_a_batch_waits_for_one_batch_more() -> None:
    # A long request keeps the worker busy in steps of 10 ms; the other arrives at 35 ms, in the fourth.
    workload = single_turns([8, 8], [20, 1], arrival_ms=[0, 35])
    ahead, behind = (
        play(workload, VllmConfig(timing=TEN_MS, async_scheduling=mode)).timeline for mode in (None, False)
    )
    assert (ahead.first_token_ns - ahead.arrival_ns).tolist() == [10 * MS, 25 * MS]
    assert (behind.first_token_ns - behind.arrival_ns).tolist() == [10 * MS, 15 * MS]


def test_the_report_names_the_mode_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "hash_ids": [1], "input_length": 100, "output_length": 3}\n')
    for flags, word in (([], "asynchronous"), (["--no-async-scheduling"], "synchronous")):
        page, values = tmp_path / "page.html", tmp_path / "values.json"
        assert main(["replay", str(trace), *flags, "--html", str(page), "--json", str(values)]) == 0
        (row,) = [line for line in capsys.readouterr().out.splitlines() if "Scheduling" in line]
        assert word in row.split()
        run = json.loads(values.read_text())["run"]
        assert (run["scheduling"], run["engine"]["async_scheduling"]) == (word, word == "asynchronous")
        assert f"<b>{word}</b> scheduling" in page.read_text()


def test_a_file_of_settings_can_say_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, config = tmp_path / "trace.jsonl", tmp_path / "fleet.yaml"
    trace.write_text('{"timestamp": 0, "hash_ids": [1], "input_length": 100, "output_length": 3}\n')
    config.write_text("engine:\n  async_scheduling: false\n")
    assert main(["replay", str(trace), "--config", str(config)]) == 0
    assert " synchronous" in capsys.readouterr().out


def test_pools_that_differ_are_both_named() -> None:
    pools = [
        WorkerPool(name="a", engine=VllmConfig()),
        WorkerPool(name="b", engine=VllmConfig(async_scheduling=False)),
    ]
    run = run_offline(RunPlan(single_turns([8, 8]), pools=pools))
    assert run.facts.scheduling == "asynchronous and synchronous"
    assert [pool.scheduling for pool in run.facts.pools] == ["asynchronous", "synchronous"]
    assert Report.build(run.timeline, run.facts).run.scheduling == "asynchronous and synchronous"


def test_a_server_schedules_as_vllm_does() -> None:
    assert ServerSettings().engine.asynchronous
    assert read_serve(["m"]).settings.engine.asynchronous
    assert not read_serve(["m", "--no-async-scheduling"]).settings.engine.asynchronous

"""`understudy.replay`: a plain function, whatever else was imported, that calls mistakes what they are."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import FunctionType
from typing import Any

import pytest

import understudy
from replay.building import single_turns
from understudy.engines.config import VllmConfig
from understudy.engines.timing import Constant
from understudy.errors import ConfigError
from understudy.tiers import TiersConfig

AFTER_ROOMS = """
import understudy.run.offline, understudy.report.report, understudy.cli
import understudy
from types import FunctionType
assert type(understudy.replay) is FunctionType
from understudy import replay
assert replay is understudy.replay
"""


def test_replay_is_a_plain_function_with_a_signature() -> None:
    assert type(understudy.replay) is FunctionType
    parameters = inspect.signature(understudy.replay).parameters
    assert list(parameters)[:2] == ["workload", "engine"]
    assert {"workers", "routing", "tiers", "slo", "threads"} <= set(parameters)


def test_it_stays_one_after_its_rooms_were_imported() -> None:
    subprocess.run([sys.executable, "-c", AFTER_ROOMS], check=True)


def test_a_model_that_changes_capacity_and_not_speed_is_said_so() -> None:
    tiers = TiersConfig.from_dict({"model": "Llama-3.1-8B", "tiers": [{"tier": "g2", "blocks": 9}]})
    (note,) = understudy.replay(single_turns([16]), tiers=tiers).run["notes"]
    assert note.startswith("Llama-3.1-8B sets what a token weighs, not how long a step takes")
    measured = VllmConfig(timing=Constant(prefill_ms=1.0, decode_ms=1.0))
    assert "notes" not in understudy.replay(single_turns([16]), measured, tiers=tiers).run
    assert "notes" not in understudy.replay(single_turns([16])).run


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"worker": 4}, "worker is no parameter of replay: did you mean workers?"),
        ({"tier": None}, "tier is no parameter of replay: did you mean tiers?"),
        ({"tiers": {"g2": 5}}, "tiers must be a TiersConfig"),
        ({"timing": "fast"}, "timing must be a TimingModel"),
        ({"slo": 5}, "slo must be an Slo"),
        ({"load": 5}, "load must be an OpenLoop"),
        ({"engine": {"block_size": 3}}, "engine must be a VllmConfig"),
        ({"workers": "4"}, "workers must be a whole number"),
        ({"threads": 1.5}, "threads must be a whole number"),
        ({"trace_block_size": 3}, "trace_block_size is an option of a trace file, but a Workload was given"),
    ],
)
def test_wrong_arguments_are_refused_by_name(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        understudy.replay(single_turns([16]), **how)

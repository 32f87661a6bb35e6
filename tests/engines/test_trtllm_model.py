"""A slow model of TensorRT-LLM's executor reproduces recordings, and the core does what the model does."""

from __future__ import annotations

import gzip
import json
import os
from typing import Any

import msgspec
import pytest

from engines.test_trtllm import GOLDEN, random_scenario
from model.trtllm_executor import TrtModel
from model.trtllm_requests import Deadlock
from understudy.conformance.trtllm import TrtRecording, find_trtllm_recordings
from understudy.conformance.trtllm_recording import TrtScenario, TrtScenarioConfig, run_trtllm_scenario
from understudy.workload.scenario import read_file_as

SOAK = bool(os.environ.get("UNDERSTUDY_SOAK_OPS"))
KEYS = (
    *("step", "clock", "fetched", "ctx", "gen", "suspended", "recompute", "sampled", "active", "waiting"),
    *("caches", "finished"),
)
ALL = [one for one in find_trtllm_recordings(GOLDEN) if not one.name.startswith("swa_scratch")]
SHORT = [one for one in ALL if one.name.endswith("-1")]
RECORDINGS = ALL if SOAK else SHORT
SEEDS = 2000 if SOAK else 25


def header_of(recording: TrtRecording) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = [json.loads(line) for line in gzip.decompress(recording.golden.read_bytes()).splitlines()]
    return lines[0], lines[1:]


def model_of(scenario: TrtScenario, header: dict[str, Any]) -> TrtModel | None:
    """The model of a scenario; None for what it does not have: several groups of pools."""
    pools = header["pools"]
    if any(len(groups) > 1 for groups in pools):
        return None
    return TrtModel(
        scenario.config,
        scenario.requests,
        pools=[groups[0][0] if isinstance(groups[0], list) else groups[0] for groups in pools],
        chunk_unit=header["chunk_unit"],
        longest=header["max_seq_len"],
    )


def compare(model: TrtModel, expected: list[dict[str, Any]]) -> None:
    """Compare each pass. The last line says how the run ended."""
    *passes, end = expected
    for line in passes:
        try:
            found = model.next_pass()
        except Deadlock:
            assert line is passes[-1], "the model is stuck before the scheduler"
            assert "deadlock" in json.dumps(end)
            return
        assert found is not None
        assert {key: found[key] for key in KEYS} == {key: line[key] for key in KEYS}
        assert found["copies"] == [copy[:2] for copy in line["copies"]]
        assert found["pool"] == [groups[0] for groups in line["pool"]]


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda one: one.name)
def test_the_model_does_what_was_recorded(recording: TrtRecording) -> None:
    header, lines = header_of(recording)
    scenario = read_file_as(TrtScenario, recording.scenario)
    config = msgspec.convert(header["config"], TrtScenarioConfig)
    model = model_of(msgspec.structs.replace(scenario, config=config), header)
    assert model is not None
    compare(model, lines)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_core_does_what_the_model_does(seed: int) -> None:
    scenario = random_scenario(10_000 + seed)
    header, *lines = run_trtllm_scenario(scenario)
    model = model_of(scenario, header)
    if model is not None:
        compare(model, lines)

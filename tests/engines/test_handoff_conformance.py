"""A prefill and a decode instance against recordings of two real schedulers joined by vLLM's NixlConnector."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from engines.handoff_random import check_scenario
from understudy._core import (
    RequestSpec,
    VllmEngine,
    VllmEngineConfig,
    VllmTransfer,
    constant_timing,
    with_transfer,
)
from understudy.conformance.compare import compare_handoff
from understudy.conformance.recordings import find_recordings
from understudy.errors import ConfigError, InvalidArgument

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-pd"
FILES = sorted(GOLDEN.glob("*.jsonl.gz"))


def name_of(path: Path) -> str:
    return path.name.removesuffix(".jsonl.gz")


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return path


def test_all_recordings_are_here_and_are_found() -> None:
    assert len(FILES) == 54
    assert {recording.kind for recording in find_recordings(GOLDEN)} == {"handoff"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_line_of_both_instances_is_the_recorded_one(path: Path) -> None:
    outcome = compare_handoff(path, check=True)
    assert outcome.difference is None
    assert outcome.steps == len(read(path)) - 3


def test_a_changed_recording_is_noticed_where_it_was_changed(tmp_path: Path) -> None:
    lines = read(GOLDEN / "00_plain.jsonl.gz")
    lines[40]["free_blocks"] += 1
    outcome = compare_handoff(write(tmp_path / "a.jsonl.gz", lines))
    assert outcome.steps == 38
    assert outcome.difference is not None
    assert outcome.difference.values[0][0] == "free_blocks"


def test_a_file_without_its_header_is_refused_by_name(tmp_path: Path) -> None:
    lines = read(GOLDEN / "00_plain.jsonl.gz")
    path = write(tmp_path / "a.jsonl.gz", [lines[0], lines[2]])
    with pytest.raises(InvalidArgument, match=r"a\.jsonl\.gz: the first two lines must be the scenario"):
        compare_handoff(path)


@pytest.mark.parametrize(("leg", "needs"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_a_leg_needs_an_instance_with_that_role(leg: str, needs: str) -> None:
    engine = VllmEngine(VllmEngineConfig(enable_prefix_caching=False), constant_timing(1.0, 1.0))
    with pytest.raises(InvalidArgument, match=needs):
        engine.submit(RequestSpec(0, "a", 8, 4, leg=leg), 0)
    assert engine.idle


def test_an_unknown_leg_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match="whole, prefill or decode"):
        RequestSpec(0, "a", 8, 4, leg="both")


def test_a_lease_of_no_time_is_refused() -> None:
    config = with_transfer(VllmEngineConfig(), VllmTransfer(produces=True, lease_s=0))
    with pytest.raises(ConfigError, match="kv_lease_duration must be 1 to 1000000 s"):
        VllmEngine(config, constant_timing(1.0, 1.0))


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("seed", range(60))
def test_no_block_is_lost_whatever_is_aborted_fails_expires_or_preempts(seed: int, push: bool) -> None:
    check_scenario(seed, push=push)

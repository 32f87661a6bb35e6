"""Hand-offs together with the host's offload, against recordings of two real schedulers with vLLM's MultiConnector."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from understudy._core import (
    VllmEngine,
    VllmEngineConfig,
    VllmTransfer,
    constant_timing,
    with_multi,
    with_transfer,
)
from understudy.conformance.compare import compare_handoff
from understudy.conformance.recordings import find_recordings
from understudy.errors import ConfigError, WrongState

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-multi"
FILES = sorted(GOLDEN.glob("*.jsonl.gz"))
# `make conformance` compares them all.
SAMPLE = [
    path for path in FILES if path.name.split("_")[0] in ("06", "108", "116", "125", "55", "71", "82", "91")
]


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_all_recordings_are_here_and_are_found() -> None:
    assert len(FILES) == 85
    assert {recording.kind for recording in find_recordings(GOLDEN)} == {"handoff"}


@pytest.mark.parametrize("path", SAMPLE, ids=lambda path: path.name.split(".")[0])
def test_every_line_of_both_instances_is_the_recorded_one(path: Path) -> None:
    outcome = compare_handoff(path, check=True)
    assert outcome.difference is None
    assert outcome.steps == len(read(path)) - 3


@pytest.mark.parametrize("key", ["told", "host_chunks", "posted", "host_events", "lookups"])
def test_a_changed_line_is_noticed_where_it_was_changed(tmp_path: Path, key: str) -> None:
    lines = read(GOLDEN / "71_rev_shared_ample_ppress_turns_full.jsonl.gz")
    place = next(place for place, line in enumerate(lines[40:], start=40) if line.get(key))
    lines[place][key] = lines[place][key] + 1 if isinstance(lines[place][key], int) else []
    changed = tmp_path / "a.jsonl.gz"
    with gzip.open(changed, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    outcome = compare_handoff(changed)
    assert outcome.steps == place - 2
    assert outcome.difference is not None


def test_several_connectors_are_both() -> None:
    config = with_multi(with_transfer(VllmEngineConfig(), VllmTransfer(produces=True)), consumes=False)
    with pytest.raises(ConfigError, match="give both"):
        VllmEngine(config, constant_timing(1.0, 1.0))


def test_an_engine_with_one_connector_has_no_log_of_several() -> None:
    engine = VllmEngine(
        with_transfer(VllmEngineConfig(), VllmTransfer(produces=True)), constant_timing(1.0, 1.0)
    )
    with pytest.raises(WrongState, match="several connectors"):
        engine.take_multi_line()

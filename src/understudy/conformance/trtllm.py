"""Compare TensorRT-LLM's simulated executor with recordings of the real one."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.conformance.compare import first_difference
from understudy.conformance.outcome import Outcome
from understudy.conformance.recordings import read_json_lines
from understudy.conformance.trtllm_recording import TrtScenario, run_trtllm_scenario
from understudy.errors import InvalidArgument
from understudy.workload.scenario import read_file_as

if TYPE_CHECKING:
    from pathlib import Path

VERSION = "1.3.0rc25"


@dataclass(frozen=True, slots=True)
class TrtRecording:
    """A scenario, and the file with what TensorRT-LLM did."""

    folder: Path
    name: str
    scenario: Path
    golden: Path


def find_trtllm_recordings(directory: Path, only: str = "*") -> list[TrtRecording]:
    """List the recordings under a folder: `scenarios/NAME.json` with `golden/NAME.jsonl.gz` beside it."""
    found = []
    for path in sorted(directory.rglob("scenarios/*.json")):
        golden = path.parents[1] / "golden" / f"{path.stem}.jsonl.gz"
        if not golden.exists():
            raise InvalidArgument(f"{path}: has no recording; add {golden}")
        if fnmatch(path.stem, only):
            found.append(TrtRecording(path.parents[1], path.stem, path, golden))
    if not found:
        raise InvalidArgument(f"{directory}: no scenarios/*.json matches {only}; name a folder of recordings")
    return found


def compare_trtllm(recording: TrtRecording, *, check: bool = False) -> Outcome:
    """Run a scenario and compare it with its recording up to the first difference."""
    header, *expected = _read_lines(recording.golden)
    scenario = read_file_as(TrtScenario, recording.scenario)
    given = {**msgspec.to_builtins(scenario.config), **header["config"]}
    try:
        config = msgspec.convert(given, type(scenario.config))
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{recording.golden}: {error}") from error
    scenario = msgspec.structs.replace(scenario, config=config)
    sizes = {key: header[key] for key in ("chunk_unit", "max_seq_len")}
    sizes["pools"] = [[pages for pages, _ in groups] for groups in header["pools"]]
    lines = run_trtllm_scenario(scenario, check=check)
    steps, difference = first_difference(lines, [sizes, *expected])
    return Outcome(recording.name, steps, difference, VERSION, VERSION)


_HEADER = {"config", "chunk_unit", "max_seq_len", "pools"}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a recording: its header, with the settings and sizes of the pools, and a line for each pass."""
    lines: list[dict[str, Any]] = read_json_lines(path)
    if not lines or not isinstance(lines[0], dict) or not lines[0].keys() >= _HEADER:
        raise InvalidArgument(f"{path}: has no header with config and pools; record it again")
    return lines

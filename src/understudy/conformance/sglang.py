"""Compare SGLang's simulated scheduler with recordings of the real one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.conformance.compare import first_difference
from understudy.conformance.outcome import Difference, Outcome
from understudy.conformance.recordings import read_lines
from understudy.conformance.sglang_clock import run_sglang_clock
from understudy.conformance.sglang_recording import SglangScenario, run_sglang_scenario
from understudy.conformance.sglang_sides import run_sglang_side
from understudy.errors import InvalidArgument, UnderstudyError
from understudy.workload.scenario import read_file_as

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSION = "0.5.23"


@dataclass(frozen=True, slots=True)
class SglangRecording:
    """A scenario, and the file with what SGLang did; one file with both on a clock."""

    folder: Path
    name: str
    scenario: Path
    golden: Path


class _ClockRecording(msgspec.Struct, frozen=True):
    scenario: SglangScenario
    recorded: dict[str, Any]


def find_sglang_recordings(directory: Path) -> list[SglangRecording]:
    """List the recordings of 0.5.23 under a folder.

    They are `scenarios/NAME.json` with `golden` or `0.5.23`, or NAME.json.gz with both.
    """
    found = [recording for folder in _folders(directory) for recording in _in_folder(folder)]
    if not found:
        raise InvalidArgument(f"{directory}: no scenarios/*.json and no recordings (*.json.gz)")
    return found


def _folders(directory: Path) -> Iterator[Path]:
    yield directory
    for path in sorted(directory.glob("*/")):
        other = path.name in ("scenarios", "golden", VERSION, "main") or path.name.startswith(
            ("vllm", "trtllm")
        )
        if path.is_dir() and not other:
            yield from _folders(path)


def _in_folder(folder: Path) -> Iterator[SglangRecording]:
    for path in sorted((folder / "scenarios").glob("*.json")):
        names = [folder / golden / f"{path.stem}.jsonl.gz" for golden in ("golden", VERSION)]
        recorded = next((name for name in names if name.exists()), None)
        if recorded is None:
            raise InvalidArgument(f"{path}: has no recording; add {names[0]} or {names[1]}")
        yield SglangRecording(folder, path.stem, path, recorded)
    for path in sorted(folder.glob("*.json.gz")):
        yield SglangRecording(folder, path.name.removesuffix(".json.gz"), path, path)


def compare_sglang(recording: SglangRecording, *, check: bool = False) -> Outcome:
    """Run a scenario and compare it with its recording up to the first difference."""
    if recording.scenario == recording.golden:
        return _compare_clock(recording, check=check)
    header, *expected = read_lines(recording.golden)
    scenario = read_file_as(SglangScenario, recording.scenario)
    scenario = _with_defaults(recording.golden, scenario, header["header"])
    run = run_sglang_scenario if scenario.config.role is None else run_sglang_side
    steps, difference = first_difference(run(scenario, check=check), expected)
    return Outcome(recording.name, steps, difference, VERSION, VERSION)


def _compare_clock(recording: SglangRecording, *, check: bool) -> Outcome:
    pair = read_file_as(_ClockRecording, recording.golden)
    recorded = pair.recorded
    scenario = _with_defaults(recording.golden, pair.scenario, recorded)
    try:
        ours = run_sglang_clock(scenario, check=check)
    except UnderstudyError as error:
        reason = f"{type(error).__name__}: {error}"
        return Outcome(recording.name, 0, Difference("", reason=reason), VERSION, VERSION)
    values = tuple((key, ours[key], recorded.get(key)) for key in ours if ours[key] != recorded.get(key))
    difference = Difference("at the end", values) if values else None
    return Outcome(recording.name, ours["turns"], difference, VERSION, VERSION)


def _with_defaults(path: Path, scenario: SglangScenario, header: object) -> SglangScenario:
    """Take the settings that the recording's header has, with the defaults of the recorder."""
    config = header.get("config") if isinstance(header, dict) else None
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path}: has no header with a config; record it again")
    given = msgspec.to_builtins(scenario.config)
    try:
        merged = msgspec.convert({**given, **config}, type(scenario.config))
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{path}: {error}") from error
    return msgspec.structs.replace(scenario, config=merged)

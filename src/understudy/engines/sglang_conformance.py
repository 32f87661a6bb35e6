"""Compare SGLang's simulated scheduler with recordings of the real one."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.engines.conformance import Difference, Outcome, first_difference
from understudy.engines.sglang_clock import run_sglang_clock
from understudy.engines.sglang_recording import SglangScenario, run_sglang_scenario
from understudy.errors import InvalidArgument, UnderstudyError

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
        other = path.name in ("scenarios", "golden", VERSION, "main") or path.name.startswith("vllm")
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
    scenario = _read(recording.scenario, recording.scenario.read_bytes())
    header, *expected = _read_lines(recording.golden)
    scenario = _with_defaults(recording.golden, scenario, header.get("header"))
    steps, difference = first_difference(run_sglang_scenario(scenario, check=check), expected)
    return Outcome(recording.name, steps, difference, VERSION, VERSION)


def _compare_clock(recording: SglangRecording, *, check: bool) -> Outcome:
    try:
        with gzip.open(recording.golden) as file:
            pair = json.load(file)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InvalidArgument(f"{recording.golden}: {error}") from error
    if not isinstance(pair, dict) or not isinstance(recorded := pair.get("recorded"), dict):
        raise InvalidArgument(f"{recording.golden}: has no scenario and recorded; record it again")
    scenario = _read(recording.golden, msgspec.json.encode(pair.get("scenario")))
    scenario = _with_defaults(recording.golden, scenario, recorded)
    try:
        ours = run_sglang_clock(scenario, check=check)
    except UnderstudyError as error:
        reason = f"{type(error).__name__}: {error}"
        return Outcome(recording.name, 0, Difference("", reason=reason), VERSION, VERSION)
    values = tuple((key, ours[key], recorded.get(key)) for key in ours if ours[key] != recorded.get(key))
    difference = Difference("at the end", values) if values else None
    return Outcome(recording.name, ours["turns"], difference, VERSION, VERSION)


def _read(path: Path, content: bytes) -> SglangScenario:
    try:
        return msgspec.json.decode(content, type=SglangScenario)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"{path}: {error}") from error


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


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InvalidArgument(f"{path}: {error}") from error
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise InvalidArgument(f"{path}: contains no lines of a recording; record it again")
    return lines

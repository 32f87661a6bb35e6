"""Compare the native planner with recorded ticks of Dynamo's."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from understudy.conformance.outcome import Difference, Outcome
from understudy.conformance.recordings import read_json_lines
from understudy.errors import ConfigError, InvalidArgument
from understudy.scaling.capabilities import read_capabilities
from understudy.scaling.estimates import LinearPassTime
from understudy.scaling.planner import DynamoPlanner
from understudy.scaling.planner_settings import read_planner_settings

if TYPE_CHECKING:
    from pathlib import Path

HEADER = {"name", "peer", "config", "capabilities", "estimator"}


@dataclass(frozen=True, slots=True)
class PlannerRecording:
    """A file with the planner's settings in its first line and a tick in each further one."""

    folder: Path
    name: str
    path: Path


def find_planner_recordings(directory: Path, only: str = "*") -> list[PlannerRecording]:
    """List the recordings under `directory` whose names match `only`. InvalidArgument when there is none."""
    found = [
        PlannerRecording(path.parent, name, path)
        for path in sorted(directory.rglob("*.jsonl.gz"))
        if fnmatch(name := path.name.removesuffix(".jsonl.gz"), only)
    ]
    if not found:
        raise InvalidArgument(f"{directory}: no recordings (*.jsonl.gz) that match {only!r}")
    return found


def compare_planner(recording: PlannerRecording) -> Outcome:
    """Feed each recorded tick's metrics to the native planner and compare decision and time of the next tick."""
    header, ticks = _read(recording.path)
    version = str(header["peer"]).split()[1] if " " in str(header["peer"]) else str(header["peer"])
    profile = f"dynamo-{'sla' if header['config'].get('optimization_target') == 'sla' else 'load'}"
    try:
        planner = make_recorded_planner(header)
    except ConfigError as error:
        return Outcome(recording.name, 0, Difference("settings", reason=str(error)), version, profile)
    next_ms: float | None = planner.initial_tick_ms()
    for number, tick in enumerate(ticks):
        at_ms = tick["metrics"]["now_ms"]
        if next_ms != at_ms:
            difference = Difference(f"tick {number}", (("now_ms", next_ms, at_ms),))
            return Outcome(recording.name, number, difference, version, profile)
        decided = planner.on_tick(tick["metrics"])
        differing = tuple(
            (key, ours, tick["decision"].get(key))
            for key, ours in decided.items()
            if ours != tick["decision"].get(key)
        )
        if differing:
            difference = Difference(f"tick {number} at {at_ms / 1000:g} s", differing)
            return Outcome(recording.name, number, difference, version, profile)
        next_ms = decided["next_tick_ms"]
    return Outcome(recording.name, len(ticks), None, version, profile)


def make_recorded_planner(header: dict[str, Any]) -> DynamoPlanner:
    """Return a planner with the settings of a recording's first line."""
    estimator = header["estimator"]
    return DynamoPlanner(
        read_planner_settings(header["config"]),
        read_capabilities(header["capabilities"]),
        None if estimator is None else LinearPassTime(**estimator),
    )


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = read_json_lines(path)
    if not lines or not isinstance(lines[0], dict) or set(lines[0]) < HEADER:
        raise InvalidArgument(f"{path}: the first line must have {', '.join(sorted(HEADER))}")
    for number, line in enumerate(lines[1:], start=2):
        if not isinstance(line, dict) or not {"metrics", "decision"} <= set(line):
            raise InvalidArgument(f"{path}: line {number} must have metrics and decision")
    return lines[0], lines[1:]

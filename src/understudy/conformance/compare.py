"""Compare the engine with recordings of the real scheduler."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from msgspec.json import encode

from understudy.conformance.clock import compare_clock
from understudy.conformance.group_offload_recording import GroupOffloadRun, GroupOffloadScenario
from understudy.conformance.group_recording import GroupRun, GroupScenario, describe_sizes
from understudy.conformance.handoff_instance import key_place
from understudy.conformance.handoff_recording import HandOffRun
from understudy.conformance.handoff_scenario import HandOffScenario
from understudy.conformance.offload_recording import OffloadRun, OffloadScenario
from understudy.conformance.outcome import Difference, Outcome
from understudy.conformance.recorder import run_scenario
from understudy.conformance.recordings import (
    Recording,
    find_recordings,
    read_json_lines,
    read_lines,
    read_pair,
    read_spec_events,
)
from understudy.conformance.spec_recording import read_spec_scenario, run_spec_scenario
from understudy.engines.offload_profiles import offload_profile
from understudy.engines.profiles import find_recorded_profile
from understudy.errors import InvalidArgument, UnderstudyError
from understudy.workload.scenario import convert_scenario, read_file_as, read_scenario

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from understudy.engines.profiles import VersionProfile

Line = dict[str, Any]


def compare_all(
    directory: Path, profile: VersionProfile | None = None, *, only: str = "*", check: bool = False
) -> Iterator[Outcome]:
    """Compare every recording under `directory` whose name matches `only`, by folder and name.

    Raises InvalidArgument when there is none, or when a file is missing or malformed.
    """
    for recording in find_recordings(directory, only):
        yield compare_recording(recording, profile, check=check)


def compare_recording(
    recording: Recording, profile: VersionProfile | None = None, *, check: bool = False
) -> Outcome:
    """Run one scenario and compare it with its recording, under the recorded version or the given profile."""
    if recording.kind == "speculation":
        return compare_speculation(recording.golden, profile, check=check)
    if recording.kind == "offload":
        return compare_offload(recording.golden, profile, check=check)
    if recording.kind == "handoff":
        return compare_handoff(recording.golden, profile, check=check)
    if recording.kind == "clock":
        return compare_clock(recording.golden, profile, check=check)
    return compare(recording.scenario, recording.golden, profile, check=check)


def compare(
    scenario: Path, golden: Path, profile: VersionProfile | None = None, *, check: bool = False
) -> Outcome:
    """Run one scenario and compare it with its golden file up to the first difference.

    The file's header names the vLLM version, which selects the profile unless one is given. Raises InvalidArgument
    when a file is missing or malformed.
    """
    header, *expected = read_lines(golden)
    version = header["header"].get("vllm", "recorded")
    profile = profile or find_recorded_profile(version)
    if "groups" in header["header"].get("config", {}):
        return compare_groups(scenario, header["header"], expected, profile, check=check)
    ours = run_scenario(read_scenario(scenario), profile, check=check)
    steps, difference = first_difference(ours, expected)
    return Outcome(scenario.stem, steps, difference, str(version), profile.name)


def compare_groups(
    path: Path, header: Line, expected: list[Line], profile: VersionProfile, *, check: bool = False
) -> Outcome:
    """Run a scenario with several KV cache groups and compare it with its golden lines, sizes first."""
    run = GroupRun(read_file_as(GroupScenario, path), profile, check=check)
    counts_lookups = not expected or "prefix_stats" in expected[-1].get("end", {})
    steps, difference = first_difference(run.lines(count_lookups=counts_lookups), expected)
    sizes = describe_sizes(run.scenario, run.config)
    if header.get("derived") not in (None, sizes):  # a recorder need not derive them
        difference = describe_difference({"sizes": sizes}, {"sizes": header["derived"]})
    return Outcome(path.stem, steps, difference, str(header.get("vllm")), profile.name)


def compare_speculation(path: Path, profile: VersionProfile | None = None, *, check: bool = False) -> Outcome:
    """Run a scenario with speculation and compare it with the recording in the same file.

    KV events are compared too, if they were recorded in `../spec-events`.
    """
    pair = read_pair(path)
    scenario = read_spec_scenario(pair["scenario"], path)
    version = pair.get("vllm", "vllm-src")
    profile = profile or find_recorded_profile(version)
    events = read_spec_events(path)
    ours = run_spec_scenario(scenario, profile, check=check, events=events is not None)
    recorded = pair["recorded"]
    if events is not None:
        recorded = [{**line, "kv_events": step} for line, step in zip(recorded, events, strict=True)]
    steps, difference = first_difference(ours, recorded)
    return Outcome(scenario.name, steps, difference, str(version), profile.name)


def compare_offload(path: Path, profile: VersionProfile | None = None, *, check: bool = False) -> Outcome:
    """Run a scenario with vLLM's native host offload and compare it with the recording in the same file.

    The offload follows the rules of the recorded release.
    """
    pair = read_pair(path)
    header, *expected = pair["recorded"]
    version = header.get("header", {}).get("vllm") if isinstance(header, dict) else None
    if not isinstance(version, str):
        raise InvalidArgument(f"{path}: the first line must be the header, with the recorded vllm version")
    rules = offload_profile(version)
    profile = profile or find_recorded_profile(version)
    run: OffloadRun | GroupOffloadRun
    if "groups" in header["header"].get("config", {}):
        grouped = convert_scenario(GroupOffloadScenario, pair["scenario"], path)
        events = bool(expected) and "host_events" in expected[0]
        run = GroupOffloadRun(grouped, profile, rules, check=check, host_events=events)
    else:
        run = OffloadRun(
            convert_scenario(OffloadScenario, pair["scenario"], path), profile, rules, check=check
        )
    steps, difference = first_difference(run.lines(), expected)
    note = (
        "" if run.halted_at is None else f"halts in step {run.halted_at}: {rules.defect or 'no request fits'}"
    )
    return Outcome(run.scenario.name, steps, difference, version, profile.name, note)


def compare_handoff(path: Path, profile: VersionProfile | None = None, *, check: bool = False) -> Outcome:
    """Run a scenario of a prefill and a decode instance and compare both with the recording in the same file."""
    lines = read_json_lines(path)
    if len(lines) < 2 or not all(isinstance(line, dict) for line in lines) or "header" not in lines[1]:
        raise InvalidArgument(f"{path}: the first two lines must be the scenario and the header")
    version = str(lines[1]["header"].get("vllm"))
    profile = profile or find_recorded_profile(version)
    scenario = convert_scenario(HandOffScenario, lines[0].get("scenario"), path)
    ours = HandOffRun(scenario, profile, version, check=check).lines()
    # Empty fields are left out, so the order of keys is not that of any one line.
    recorded = ({key: line[key] for key in sorted(line, key=key_place)} for line in lines[2:])
    steps, difference = first_difference(ours, recorded)
    return Outcome(scenario.name, steps, difference, version, profile.name)


def first_difference(ours: Iterable[Line], recorded: Iterable[Line]) -> tuple[int, Difference | None]:
    """Return the number of identical steps and the first difference after them."""
    steps = 0
    try:
        for mine, theirs in itertools.zip_longest(ours, recorded):
            if mine != theirs or encode(mine) != encode(theirs):  # key order counts
                return steps, describe_difference(mine, theirs)
            steps += "step" in mine
    except UnderstudyError as error:
        return steps, Difference(f"step {steps}", reason=f"{type(error).__name__}: {error}")
    return steps, None


def describe_difference(ours: Line | None, theirs: Line | None) -> Difference:
    """Describe where two lines differ."""
    if ours is None or theirs is None:
        return Difference(
            "", reason="the recording continues" if ours is None else "the recording ends earlier"
        )
    where = f"step {theirs['step']}" if "step" in theirs else "at the end"
    if ("step" in ours) != ("step" in theirs):
        return Difference(where, reason="one run has ended, the other has not")
    values = tuple(
        (key, ours.get(key), value)
        for key, value in theirs.items()
        if ours.get(key) != value or encode(ours.get(key)) != encode(value)
    )
    if values:
        return Difference(where, values)
    return Difference(where, reason=f"unexpected {sorted(set(ours) - set(theirs))}")

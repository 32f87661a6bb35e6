"""Compare recordings with the engine under the profile of a release."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.conformance.compare import compare_recording
from understudy.conformance.outcome import Difference
from understudy.conformance.recordings import Recording
from understudy.engines.profiles import find_profile
from understudy.errors import UnderstudyError

if TYPE_CHECKING:
    from release.families import Kind, Scenario


def write_recording(
    folder: Path, kind: Kind, name: str, scenario: Scenario, answer: dict[str, Any]
) -> Recording:
    """Write a recording as `understudy conformance vllm` reads it."""
    version, recorded = f"v{answer['vllm']}", answer["recorded"]
    if kind == "steps" or kind == "groups":
        source, golden = folder / "scenarios" / f"{name}.json", folder / "golden" / f"{name}.jsonl.gz"
        for path in (source, golden):
            path.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(json.dumps(scenario), encoding="utf-8")
        _write_lines(golden, recorded)
        return Recording("steps", folder, name, source, golden)
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "pairs":
        golden = folder / f"{name}.jsonl.gz"
        _write_lines(golden, [{"scenario": scenario}, *recorded])
        return Recording("handoff", folder, name, golden, golden)
    golden = folder / f"{name}.json.gz"
    pair = {"scenario": scenario, "recorded": recorded}
    if kind != "offload":
        pair["vllm"] = version
    with gzip.open(golden, "wt", encoding="utf-8", compresslevel=1) as file:
        file.write(json.dumps(pair))
    if kind == "speculation":
        events = folder.parent / "spec-events"
        events.mkdir(exist_ok=True)
        _write_lines(events / f"{name}.jsonl.gz", answer["events"])
    return Recording(kind, folder, name, golden, golden)


def _write_lines(path: Path, lines: list[Any]) -> None:
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def compare_with(
    release: str, kind: Kind, name: str, scenario: Scenario, answer: dict[str, Any]
) -> Difference | None:
    """Return the first difference from our engine under a release's profile; None when every step is identical."""
    with tempfile.TemporaryDirectory() as folder:
        recording = write_recording(
            Path(folder) / "recordings", kind, name, adapted(scenario, release), _relabelled(answer, release)
        )
        try:
            return compare_recording(recording).difference
        except UnderstudyError as error:
            return Difference("", reason=f"{type(error).__name__}: {error}")


def adapted(scenario: Scenario, release: str) -> Scenario:
    """Return the scenario without settings that have no effect in a release."""
    config = scenario.get("config", {})
    if find_profile(release).has_prefill_interval or "prefill_schedule_interval" not in config:
        return scenario
    kept = {name: value for name, value in config.items() if name != "prefill_schedule_interval"}
    return {**scenario, "config": kept}


def _relabelled(answer: dict[str, Any], release: str) -> dict[str, Any]:
    """Return the recording with another release in its header, which selects the profile."""
    recorded = answer["recorded"]
    if isinstance(recorded, list) and recorded and "header" in recorded[0]:
        header = {**recorded[0]["header"], "vllm": f"v{release}"}
        recorded = [{"header": header}, *recorded[1:]]
    return {**answer, "vllm": release, "recorded": recorded}

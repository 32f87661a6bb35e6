"""vLLM's native host offload against recordings of its scheduler with that connector."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from model.vllm_connector import RELEASES
from model.vllm_offload import named, run_offload
from understudy.conformance.compare import compare_offload
from understudy.conformance.recordings import find_recordings
from understudy.engines.offload_profiles import RECORDED, V0_32, offload_profile
from understudy.errors import ConfigError, InvalidArgument

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-offload"
FILES = sorted(GOLDEN.glob("*/*.json.gz"))
STALLS = ["26_async_prio_large_turns", "30_abort_chunk4_turns_full_stall"]


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.name.removesuffix('.json.gz')}"


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        pair: dict[str, Any] = json.load(file)
    return pair


def doctored(path: Path, to: Path, **changes: Any) -> Path:
    pair = read(path)
    pair |= changes
    with gzip.open(to, "wt", encoding="utf-8") as file:
        file.write(json.dumps(pair))
    return to


def test_all_recordings_are_here_and_are_found() -> None:
    assert len(FILES) == 42
    assert {recording.kind for recording in find_recordings(GOLDEN)} == {"offload"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_line_is_the_recorded_one(path: Path) -> None:
    outcome = compare_offload(path, check=True)
    assert outcome.difference is None
    assert outcome.steps == len(read(path)["recorded"]) - 2
    stalls = path.parent.name == "recorded" and any(name in path.name for name in STALLS)
    assert (RECORDED.defect in outcome.note) == stalls


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_slow_model_says_the_same(path: Path) -> None:
    pair = read(path)
    _, *recorded, _ = pair["recorded"]
    lines = named(list(run_offload(pair["scenario"], RELEASES[path.parent.name])))
    for ours, theirs in zip(lines, recorded, strict=True):
        assert {key: ours[key] for key in theirs} == theirs


def test_the_halt_is_told_with_the_step_in_which_it_begins() -> None:
    outcome = compare_offload(GOLDEN / "recorded" / "26_async_prio_large_turns.json.gz")
    first_idle = 1 + max(
        line["step"]
        for line in read(GOLDEN / "recorded" / "26_async_prio_large_turns.json.gz")["recorded"][1:-1]
        if line["scheduled"] or line["jobs_done"] or line["stores"] or line["loads"] or line["finished"]
    )
    assert outcome.note.startswith("halts in step ")
    assert int(outcome.note.split()[3].rstrip(":")) >= first_idle


@pytest.mark.parametrize("key", ["lookups", "stores", "flush", "host_lru", "evicted", "blocks", "jobs_done"])
def test_a_value_that_was_not_recorded_so_is_found(tmp_path: Path, key: str) -> None:
    path = GOLDEN / "recorded" / "05_small_turns_full.json.gz"
    recorded = read(path)["recorded"]
    step = next(index for index, line in enumerate(recorded[1:-1], 1) if line[key])
    recorded[step][key] = {} if isinstance(recorded[step][key], dict) else []
    outcome = compare_offload(doctored(path, tmp_path / "doctored.json.gz", recorded=recorded))
    assert outcome.difference is not None
    assert outcome.difference.where == f"step {recorded[step]['step']}"
    assert [name for name, _, _ in outcome.difference.values] == [key]


def test_releases_between_the_recorded_ones_have_their_own_rules() -> None:
    assert offload_profile("0.32.0") is offload_profile("v0.32") is V0_32
    rules = {version: offload_profile(version) for version in ("0.28.0", "0.29.1", "v0.30", "0.31.0.post1")}
    names = ("touches", "arc_falls_back", "stores_last_token", "holders_first", "spares_in_flight")
    assert {version: tuple(getattr(rule, name) for name in names) for version, rule in rules.items()} == {
        "0.28.0": (True, False, True, False, False),
        "0.29.1": (True, False, True, False, False),
        "v0.30": (True, True, False, False, True),
        "0.31.0.post1": (False, True, False, True, True),
    }
    assert [rule.name for rule in rules.values()] == ["v0.28", "v0.29", "v0.30", "v0.31"]
    assert [bool(rule.defect) for rule in rules.values()] == [True, True, True, False]


@pytest.mark.parametrize("version", ["0.27.1", "0.18.1", "0.34.0", "1.0"])
def test_a_release_whose_offload_has_other_rules_is_refused(version: str) -> None:
    with pytest.raises(ConfigError, match=r"not simulated; give 0\.28 to 0\.33, or recorded"):
        offload_profile(version)


def test_a_recording_that_does_not_say_of_what_is_refused(tmp_path: Path) -> None:
    path = doctored(FILES[0], tmp_path / "headless.json.gz", recorded=[{"step": 0}])
    with pytest.raises(InvalidArgument, match="the first line must be the header"):
        compare_offload(path)


def test_a_field_that_scenarios_do_not_have_is_named(tmp_path: Path) -> None:
    scenario = read(FILES[0])["scenario"]
    scenario["offload"]["disk_chunks"] = 3
    with pytest.raises(InvalidArgument, match="disk_chunks"):
        compare_offload(doctored(FILES[0], tmp_path / "odd.json.gz", scenario=scenario))

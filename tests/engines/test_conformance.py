"""The engine against schedules recorded from the real scheduler, and what the comparison says when they differ."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from understudy.conformance.compare import compare, compare_all, compare_recording, describe_difference
from understudy.conformance.outcome import Outcome
from understudy.conformance.recorder import run_scenario
from understudy.conformance.recordings import Recording, find_recordings
from understudy.engines.profiles import NEWEST, PROFILES, find_profile
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument
from understudy.workload.scenario import read_scenario

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm"
NAMES = sorted(path.stem for path in (GOLDEN / "scenarios").glob("*.json"))
FOLDERS = {
    "vllm-aborts": 59,
    "vllm-async-aborts": 47,
    "vllm-eos": 15,
    "vllm-versions/v0.18.1": 40,
    "vllm-versions/v0.23.0": 40,
    "vllm-versions/v0.27.0": 40,
    "vllm-versions/v0.32.0": 40,
}
STALLS = ["outgrows_pool", "too_long_chunked", "too_long_reserve"]
CHECKED_STEPS = 260  # a recording of up to so many steps is played with every invariant verified too


def scenario_path(name: str) -> Path:
    return GOLDEN / "scenarios" / f"{name}.json"


def golden_path(name: str) -> Path:
    return GOLDEN / "golden" / f"{name}.jsonl.gz"


def golden_lines(name: str) -> list[dict[str, Any]]:
    with gzip.open(golden_path(name), "rt", encoding="utf-8") as lines:
        return [msgspec.json.decode(line) for line in lines]


def write_golden(path: Path, lines: list[dict[str, Any]]) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in lines)
    return path


def doctored(directory: Path, name: str, change: dict[int, dict[str, Any]]) -> Outcome:
    """Compare with a copy of the recording in which some steps have other values."""
    lines = golden_lines(name)
    for step, values in change.items():
        lines[step + 1] |= values
    return compare(scenario_path(name), write_golden(directory / "doctored.jsonl.gz", lines))


def test_all_recorded_scenarios_are_here() -> None:
    assert len(NAMES) == 51


@pytest.mark.parametrize("name", NAMES)
def test_every_step_is_the_recorded_one(name: str) -> None:
    recorded = golden_lines(name)[-1]["end"]["steps"]
    outcome = compare(scenario_path(name), golden_path(name), check=recorded <= CHECKED_STEPS)
    revision = "a014e35f38c80fb0652387740193ad2147fed6a3"
    assert outcome == Outcome(name, recorded, None, revision, "recorded")


WIDER = [recording for folder in FOLDERS for recording in find_recordings(GOLDEN.parent / folder)]


def test_all_wider_recordings_are_here() -> None:
    assert len(WIDER) == sum(FOLDERS.values())


@pytest.mark.parametrize("recording", WIDER, ids=lambda r: f"{r.folder.name}-{r.name}")
def test_aborts_ends_by_eos_and_every_recorded_version_are_step_for_step_the_same(
    recording: Recording,
) -> None:
    outcome = compare_recording(recording)
    assert outcome.difference is None
    assert outcome.steps > 0


def test_a_lone_request_is_not_capped_since_v0_31() -> None:
    folder = GOLDEN.parent / "vllm-versions" / "v0.32.0"
    older = [outcome for outcome in compare_all(folder, find_profile("0.30")) if outcome.difference]
    assert 0 < len(older) < FOLDERS["vllm-versions/v0.32.0"]
    assert {outcome.profile for outcome in older} == {"recorded"}


@pytest.mark.parametrize("name", STALLS)
def test_what_stalls_for_ever_in_vllm_stalls_here(name: str) -> None:
    *steps, end = run_scenario(read_scenario(scenario_path(name)))
    assert end["end"]["reason"] == "max_steps"
    assert all(not step["scheduled"] and step["waiting"] > 0 for step in steps[-20:])


# ── Differences ──


def test_a_difference_names_the_step_the_key_and_both_values(tmp_path: Path) -> None:
    outcome = doctored(tmp_path, "single", {7: {"free_blocks": 12345}})
    assert outcome.steps == 7
    assert outcome.difference is not None
    assert str(outcome.difference).startswith("step 7: free_blocks is ")
    assert str(outcome.difference).endswith("recorded 12345")
    assert [key for key, _, _ in outcome.difference.values] == ["free_blocks"]


def test_the_first_difference_counts(tmp_path: Path) -> None:
    outcome = doctored(tmp_path, "single", {5: {"waiting": 3}, 2: {"running": ["ghost"]}})
    assert outcome.difference is not None
    assert str(outcome.difference).startswith("step 2: running is ")


def test_the_order_of_scheduled_requests_counts(tmp_path: Path) -> None:
    scheduled = golden_lines("identical_same_step")[1]["scheduled"]
    assert len(scheduled) > 1
    backwards = dict(reversed(scheduled.items()))
    assert backwards == scheduled
    outcome = doctored(tmp_path, "identical_same_step", {0: {"scheduled": backwards}})
    assert outcome.difference is not None
    assert str(outcome.difference).startswith("step 0: scheduled is ")


def test_a_recording_that_goes_on_or_ends_earlier_differs(tmp_path: Path) -> None:
    lines = golden_lines("single")
    shorter = compare(scenario_path("single"), write_golden(tmp_path / "a.jsonl.gz", lines[:-1]))
    assert str(shorter.difference) == "the recording ends earlier"
    longer = compare(scenario_path("single"), write_golden(tmp_path / "b.jsonl.gz", [*lines, lines[-1]]))
    assert str(longer.difference) == "the recording continues"
    fewer_steps = compare(
        scenario_path("single"), write_golden(tmp_path / "c.jsonl.gz", [*lines[:10], lines[-1]])
    )
    assert str(fewer_steps.difference) == "at the end: one run has ended, the other has not"


def test_a_different_total_is_a_difference_at_the_end(tmp_path: Path) -> None:
    lines = golden_lines("single")
    lines[-1]["end"]["stored_blocks"] += 1
    outcome = compare(scenario_path("single"), write_golden(tmp_path / "a.jsonl.gz", lines))
    assert outcome.steps == lines[-1]["end"]["steps"]
    assert outcome.difference is not None
    assert str(outcome.difference).startswith("at the end: end is ")


def test_a_key_that_the_recording_lacks_is_a_difference() -> None:
    ours = {"step": 3, "running": [], "extra": 1}
    assert str(describe_difference(ours, {"step": 3, "running": []})) == "step 3: unexpected ['extra']"


def test_an_error_of_the_engine_is_a_difference(tmp_path: Path) -> None:
    scenario = json.loads(scenario_path("single").read_text())
    scenario["requests"][0]["prompt"] = []
    path = tmp_path / "single.json"
    path.write_text(json.dumps(scenario))
    outcome = compare(path, golden_path("single"))
    assert outcome.difference is not None
    assert str(outcome.difference).startswith("step 0: InvalidArgument: ")
    assert "prompt is empty" in str(outcome.difference)


@pytest.mark.parametrize("name", ["v0.23", "v0.18"])
def test_an_older_version_schedules_differently_where_the_free_list_matters(name: str) -> None:
    profile = find_profile(name)
    outcome = compare(scenario_path("eviction_order"), golden_path("eviction_order"), profile)
    assert outcome.difference is not None
    assert "free_head" in str(outcome.difference)


def test_versions_with_the_recorded_free_list_schedule_alike() -> None:
    for name in ("v0.24", "v0.27"):  # v0.27 differs with prefix caching off only
        outcome = compare(scenario_path("eviction_order"), golden_path("eviction_order"), PROFILES[name])
        assert outcome.difference is None
    outcome = compare(scenario_path("fuzz_2"), golden_path("fuzz_2"), PROFILES["v0.27"])
    assert outcome.difference is not None


def test_a_setting_that_the_version_lacks_is_a_difference_that_names_it() -> None:
    outcome = compare(scenario_path("watermark_small"), golden_path("watermark_small"), PROFILES["v0.23"])
    assert outcome.difference is not None
    assert "ConfigError: watermark" in str(outcome.difference)


@pytest.mark.parametrize(
    ("release", "profile"),
    [
        ("0.32.0", "v0.31"),
        ("v0.31", "v0.31"),
        ("v0.30", "recorded"),
        ("0.28.0", "recorded"),
        ("0.27.1", "v0.27"),
        ("0.26.0", "v0.24"),
        ("0.25.1.post1", "v0.24"),
        ("v0.23.0", "v0.23"),
        ("0.19", "v0.23"),
        ("0.18", "v0.18"),
        ("recorded", "recorded"),
        ("0.33.0", "v0.33"),
        (NEWEST, "v0.33"),
    ],
)
def test_every_release_has_its_profile(release: str, profile: str) -> None:
    assert find_profile(release).name == profile


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v0.34.0", r"0\.34\.0.*newest known release is 0\.33"),
        ("1.0", r"newest known release is 0\.33"),
        ("0.17.0", r"oldest known release is 0\.18"),
        ("main", r"'main'.*a release from 0\.18 to 0\.33"),
        ("0.31.0rc1", r"a release from 0\.18 to 0\.33"),
        ("", r"a release from"),
    ],
)
def test_an_unknown_version_is_refused_with_the_newest_known(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_profile(name)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_num_active_seqs": 1},
        {"long_prefill_token_threshold_adaptive": True, "long_prefill_token_threshold": 9},
    ],
)
def test_settings_that_came_with_v0_31_are_refused_before_it(setting: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"{next(iter(setting))} is not a setting of vLLM 0.30.0; choose 0.31"
    ):
        VllmConfig(**setting, vllm_version="0.30.0")
    VllmConfig(**setting)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"watermark": 1.0}, "watermark must be a share from 0 and below 1, got 1"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            "max_num_seqs=9 must not be above max_num_batched_tokens=8",
        ),
        (
            {"long_prefill_token_threshold": 101, "max_model_len": 100},
            "long_prefill_token_threshold=101 must not be above max_model_len=100",
        ),
    ],
)
def test_limits_that_vllm_refuses_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        VllmConfig(**settings)


def test_the_default_number_of_requests_follows_a_smaller_budget() -> None:
    assert VllmConfig(max_num_batched_tokens=8).max_num_seqs == 8
    assert VllmConfig().max_num_seqs == 256


def test_no_more_may_be_active_than_run() -> None:
    with pytest.raises(ConfigError, match="max_num_active_seqs=9 must not be above max_num_seqs=8"):
        VllmConfig(max_num_active_seqs=9, max_num_seqs=8)


# ── Files ──


def copy_of(directory: Path, *names: str) -> Path:
    for part in ("scenarios", "golden"):
        (directory / part).mkdir()
    for name in names:
        shutil.copy(scenario_path(name), directory / "scenarios")
        shutil.copy(golden_path(name), directory / "golden")
    return directory


def test_a_directory_is_compared_in_name_order(tmp_path: Path) -> None:
    outcomes = list(compare_all(copy_of(tmp_path, "single", "async_fuzz_1", "priority_phantom_hit")))
    assert [outcome.name for outcome in outcomes] == ["async_fuzz_1", "priority_phantom_hit", "single"]
    assert all(outcome.difference is None for outcome in outcomes)


def test_only_matching_scenarios_are_compared(tmp_path: Path) -> None:
    directory = copy_of(tmp_path, "single", "async_fuzz_1")
    assert [outcome.name for outcome in compare_all(directory, only="async_*")] == ["async_fuzz_1"]
    with pytest.raises(InvalidArgument, match=r"nothing_\*"):
        list(compare_all(directory, only="nothing_*"))


def test_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no scenarios"):
        list(compare_all(tmp_path))


def test_a_missing_recording_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    directory = copy_of(tmp_path, "single")
    (directory / "golden" / "single.jsonl.gz").unlink()
    with pytest.raises(InvalidArgument, match=r"single\.jsonl\.gz"):
        list(compare_all(directory))


@pytest.mark.parametrize(
    "content",
    [
        b"not gzip",
        gzip.compress(b"not json\n"),
        gzip.compress(b'{"step": 0}\n'),
        gzip.compress(b""),
        gzip.compress(b'{"header": {}}\n' * 50)[:-12],
        gzip.compress(b'["header"]\n'),
        gzip.compress(b'{"header": {}}\n[1]\n'),
        gzip.compress(b"\xff\n"),
        gzip.compress(b"")[:10] + b"\xff" * 20,
    ],
    ids=["plain", "text", "no header", "empty", "cut off", "a list", "a list later", "not text", "damaged"],
)
def test_a_malformed_recording_is_an_error_that_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=r"broken\.jsonl\.gz"):
        compare(scenario_path("single"), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_steps": "many"}, "max_steps"),
        ({"extra": 1}, "extra"),
        ({"config": {"num_gpu_blocks": 4}}, "num_gpu_blocks"),
        ({"config": {"policy": "random"}}, "policy"),
        ({"requests": [{"id": "a"}]}, "arrival_step"),
        ({"requests": [{"id": "a", "arrival_step": 0, "prompt": [[1]], "max_tokens": 1}]}, "prompt"),
    ],
)
def test_a_malformed_scenario_is_an_error_that_names_file_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(json.loads(scenario_path("single").read_text()) | change))
    with pytest.raises(InvalidArgument, match=rf"broken\.json.*{message}"):
        compare(path, golden_path("single"))


def test_a_missing_scenario_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="nowhere"):
        read_scenario(tmp_path / "nowhere.json")

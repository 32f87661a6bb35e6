"""The scheduler model against schedules recorded from the real vLLM, and its notable behaviours in words."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.json import encode

from model.scenario_gen import random_scenario
from model.vllm_config import PROFILES, RECORDED, V0_18, V0_23, V0_27, V0_31, Config, Profile
from model.vllm_format import RequestSpec, Scenario, StepRecord, expand_prompt
from model.vllm_runs import run_scenario
from model.vllm_scheduler import VllmModel

GOLDEN = Path(__file__).parent / "golden" / "vllm"
NAMES = sorted(path.stem for path in (GOLDEN / "scenarios").glob("*.json"))
STALLS = ["outgrows_pool", "too_long_chunked", "too_long_reserve"]


def load(name: str) -> Scenario:
    scenario: Scenario = json.loads((GOLDEN / "scenarios" / f"{name}.json").read_text())
    return scenario


def golden_lines(name: str) -> list[str]:
    with gzip.open(GOLDEN / "golden" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return lines.read().splitlines()


def request(name: str, prompt_tokens: int, max_tokens: int, start: int = 1, priority: int = 0) -> RequestSpec:
    return {
        "id": name,
        "prompt": [[start, prompt_tokens]],
        "max_tokens": max_tokens,
        "arrival_step": 0,
        "priority": priority,
    }


def model_with(*requests: RequestSpec, profile: Profile = RECORDED, **config: Any) -> VllmModel:
    model = VllmModel(config, profile)
    for index, spec in enumerate(requests):
        model.add(spec, index)
    return model


def run_phantom_scenario(profile: Profile) -> tuple[VllmModel, list[StepRecord]]:
    scenario = load("priority_phantom_hit")
    model = VllmModel(scenario["config"], profile)
    records = []
    for step in range(16):
        for index, spec in enumerate(scenario["requests"]):
            if spec["arrival_step"] == step:
                model.add(spec, index)
        records.append(model.step())
        model.check()
    return model, records


def test_all_recorded_scenarios_are_here() -> None:
    assert len(NAMES) == 51
    assert {path.name.removesuffix(".jsonl.gz") for path in (GOLDEN / "golden").iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_line_is_reproduced(name: str) -> None:
    header, *expected = golden_lines(name)
    scenario = load(name)
    config = vars(Config.parse(scenario["config"]))
    recorded = json.loads(header)["header"]["config"]
    assert recorded == {name: config[name] for name in recorded}
    lines = 0
    for line, record in zip(expected, run_scenario(scenario), strict=True):
        # As text, because the order of keys is part of the record.
        assert encode(record).decode() == line
        lines += 1
    assert lines == len(expected) > 1


WIDER = ("vllm-aborts", "vllm-async-aborts", "vllm-eos", "vllm-versions/v0.32.0")


@pytest.mark.parametrize("folder", WIDER)
def test_aborts_ends_by_eos_and_the_newest_version_are_reproduced(folder: str) -> None:
    profile = V0_31 if "0.32" in folder else RECORDED
    for path in sorted((GOLDEN.parent / folder / "scenarios").glob("*.json"))[::6]:
        golden = GOLDEN.parent / folder / "golden" / f"{path.stem}.jsonl.gz"
        _, *expected = gzip.decompress(golden.read_bytes()).decode().splitlines()
        for line, record in zip(expected, run_scenario(json.loads(path.read_text()), profile), strict=True):
            assert encode(record).decode() == line, path.stem


@pytest.mark.parametrize("name", STALLS)
def test_a_request_that_cannot_fit_stalls_for_ever(name: str) -> None:
    *steps, end = run_scenario(load(name))
    assert end["end"]["reason"] == "max_steps"
    assert all(not step["scheduled"] and step["waiting"] > 0 for step in steps[-20:])
    assert steps[-1]["free_blocks"] == load(name)["config"]["num_blocks"] - 1


def test_a_priority_victim_resumes_with_blocks_nobody_computed() -> None:
    model, records = run_phantom_scenario(RECORDED)
    computed = sum(record["scheduled"].get("low", 0) for record in records[:5])
    assert records[4]["preempted"] == ["low"]
    assert computed == 192
    assert records[5]["cached"] == {"low": 224}
    assert model.phantom_hit_blocks == 4  # two blocks, hit again when it resumes for the second time


def test_without_the_defect_a_priority_victim_resumes_with_what_it_computed() -> None:
    model, records = run_phantom_scenario(Profile("fixed", phantom_hit=False))
    assert records[4]["preempted"] == ["low"]
    assert records[5]["cached"] == {"low": 192}
    assert model.phantom_hit_blocks == 0


def test_one_preemption_stops_all_admissions_of_its_step() -> None:
    # Six usable blocks of 4 tokens: both need one more in step 1, and there is one left.
    model = model_with(
        request("a", 8, 9, start=1),
        request("b", 12, 9, start=100),
        block_size=4,
        num_blocks=7,
        scheduler_reserve_full_isl=False,
    )
    assert model.step()["scheduled"] == {"a": 8, "b": 12}
    model.add(request("c", 1, 1, start=200), 2)
    record = model.step()
    assert record["preempted"] == ["b"]
    assert record["free_after_schedule"] == 3  # room for c, and still it waits
    assert record["waiting_head"] == ["b", "c"]
    assert record["new"] == []


def test_a_fully_cached_prompt_recomputes_its_last_block() -> None:
    model = model_with(request("a", 32, 1), request("b", 32, 1), num_blocks=20)
    record = model.step()
    assert record["cached"] == {"a": 0, "b": 16}
    assert [event["h"] for event in record["kv_events"]] == [[0, 1], [1]]


def test_asynchronous_events_appear_with_the_update_one_step_later() -> None:
    model = model_with(request("a", 16, 3), num_blocks=20, async_scheduling=True)
    assert model.step()["kv_events"] == []
    assert [event["h"] for event in model.step()["kv_events"]] == [[0]]


def test_a_request_cancelled_with_a_token_in_flight_leaves_nothing_behind() -> None:
    model = model_with(
        request("a", 40, 9), request("b", 40, 2, start=100), num_blocks=9, async_scheduling=True
    )
    model.step()
    model.cancel("a")
    model.check()
    records = [model.step() for _ in range(3)]
    assert [record["finished"] for record in records] == [[], ["b"], []]
    assert records[-1]["free_blocks"] == 8
    with pytest.raises(KeyError):
        model.cancel("a")


@pytest.mark.parametrize(
    ("profile", "caching", "expected"),
    [
        (RECORDED, True, [3, 4, 5, 2]),  # the unfilled block in front, the filled ones at the end, tail first
        (V0_27, True, [3, 4, 5, 2]),
        (V0_23, True, [4, 5, 3, 2]),
        (RECORDED, False, [3, 2, 1, 4]),
        (V0_27, False, [4, 5, 3, 2]),
        (V0_23, False, [4, 5, 3, 2]),
    ],
)
def test_freed_blocks_enter_the_free_list_where_the_version_puts_them(
    profile: Profile, caching: bool, expected: list[int]
) -> None:
    model = model_with(
        request("a", 9, 1), profile=profile, block_size=4, num_blocks=6, enable_prefix_caching=caching
    )
    assert model.step()["free_head"] == expected


def test_settings_a_version_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="watermark"):
        Config.parse({"watermark": 0.1}, V0_23)
    with pytest.raises(ValueError, match="scheduler_reserve_full_isl"):
        Config.parse({"scheduler_reserve_full_isl": True}, V0_18)
    assert not Config.parse({}, V0_18).scheduler_reserve_full_isl
    with pytest.raises(ValueError, match="num_gpu_blocks"):
        Config.parse({"num_gpu_blocks": 4})


def test_a_random_watermark_is_one_that_vllm_takes() -> None:
    # At this seed a number just below 1 is drawn, which rounds to 1.
    assert random_scenario(713031)["config"]["watermark"] == 0.999


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_random_scenarios_keep_blocks_and_index_consistent(profile: Profile) -> None:
    for seed in range(40):
        scenario = random_scenario(seed, profile)
        assert scenario == random_scenario(seed, profile)
        model = VllmModel(scenario["config"], profile)
        for step in range(60):
            for index, spec in enumerate(scenario["requests"]):
                if spec["arrival_step"] == step:
                    assert 0 < len(expand_prompt(spec["prompt"])) < model.config.max_model_len
                    model.add(spec, index)
            model.step()
            model.check()

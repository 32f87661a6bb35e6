"""Speculative decoding as vLLM does it: recorded schedules, the slow model, and what it says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from engines.building import engine_profile
from model.scenario_gen import random_scenario
from model.spec_scheduler import run_spec_scenario as run_model
from model.vllm_config import RECORDED
from replay.building import ONE_MS, crowd, play, single_turns
from understudy.conformance.compare import compare_recording
from understudy.conformance.recordings import Recording, find_recordings, read_pair
from understudy.conformance.spec_recording import SpecScenario, run_spec_scenario
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.profiles import find_profile
from understudy.engines.speculation import SpeculativeConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import read_mooncake, write_mooncake

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-spec"
RECORDINGS = find_recordings(GOLDEN)
AHEAD = find_recordings(GOLDEN.parent / "vllm-async-spec")


def mtp(k: int = 2, rates: tuple[float, ...] = (1.0, 1.0), **settings: Any) -> VllmConfig:
    speculation = SpeculativeConfig(method="mtp", num_speculative_tokens=k, accept_rates=rates)
    return VllmConfig(
        **{"timing": ONE_MS, "speculative_config": speculation, "async_scheduling": False, **settings}
    )


def test_all_recordings_are_here() -> None:
    assert (len(RECORDINGS), len(AHEAD)) == (24, 16)


@pytest.mark.parametrize("recording", RECORDINGS + AHEAD, ids=lambda recording: recording.name)
def test_every_step_is_the_recorded_one(recording: Recording) -> None:
    outcome = compare_recording(recording, check=True)
    assert outcome.difference is None
    assert outcome.steps == len(read_pair(recording.golden)["recorded"])


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: recording.name)
def test_the_model_reproduces_every_step(recording: Recording) -> None:
    pair = read_pair(recording.golden)
    ours = [msgspec.json.encode(line) for line in run_model(pair["scenario"], RECORDED)]
    assert ours == [msgspec.json.encode(line) for line in pair["recorded"]]


def drafted(seed: int, *, asynchronous: bool = False) -> dict[str, Any]:
    """A random scenario with speculation."""
    scenario = random_scenario(seed)
    rng = Random(f"drafts {seed}")
    k = rng.randint(1, 6)
    config = {**scenario["config"], "async_scheduling": asynchronous}
    requests: list[dict[str, Any]] = [
        {**spec, "accept": [rng.randint(0, k + 1) for _ in range(rng.randint(1, 6))]}
        for spec in scenario["requests"]
    ]
    for request in requests:
        if rng.random() < 0.3:
            request["eos_at"] = rng.randint(1, request["max_tokens"])
    return {
        "name": scenario["name"],
        "method": "mtp" if asynchronous else rng.choice(["mtp", "ngram"]),
        "k": k,
        "config": config,
        "max_steps": 300,
        "requests": requests,
    }


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("part", range(4))
def test_random_scenarios_are_scheduled_as_the_model_does(part: int, asynchronous: bool) -> None:
    for seed in range(part, 60, 4):
        scenario = drafted(seed, asynchronous=asynchronous)
        ours = run_spec_scenario(
            msgspec.convert(scenario, SpecScenario), engine_profile(RECORDED), check=True
        )
        for line, theirs in zip(ours, run_model(scenario, RECORDED), strict=True):
            assert msgspec.json.encode(line) == msgspec.json.encode(theirs), f"seed {seed}"


# ── A replay ──


def test_every_accepted_draft_saves_a_step_and_the_first_token_comes_alone() -> None:
    report = play(single_turns([20], 7), mtp()).timeline
    # One token ends the prefill; then three a step.
    assert report.steps == 3
    assert report.output_tokens.tolist() == [7]
    assert (report.draft_rounds, report.drafted_tokens, report.accepted_tokens) == (2, 4, 4)
    assert report.second_token_ns.tolist() == [2_000_000]


def test_rejected_drafts_are_wasted_and_change_nothing_but_the_budget() -> None:
    timeline = play(single_turns([20], 7), mtp(rates=(0.0, 0.0))).timeline
    assert timeline.steps == 7
    assert (timeline.draft_rounds, timeline.drafted_tokens, timeline.accepted_tokens) == (6, 12, 0)


def test_eagle_like_methods_compute_the_last_block_of_a_hit_again_and_ngram_does_not() -> None:
    workload = single_turns([65, 65], 3, arrival_ms=[0, 50], content=[range(5), range(5)])
    hits = {}
    for method in ("mtp", "eagle", "eagle3", "draft_model", "ngram"):
        speculation = SpeculativeConfig(method=method, num_speculative_tokens=2)
        config = VllmConfig(block_size=16, timing=ONE_MS, speculative_config=speculation, vllm_version="0.32")
        hits[method] = int(play(workload, config).timeline.cached_tokens_first[1])
    assert hits == {"mtp": 48, "eagle": 48, "eagle3": 48, "draft_model": 64, "ngram": 64}


def test_a_trace_says_how_many_drafts_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 20, "output_length": 7, "hash_ids": [0], "accepted_drafts": [2, 1]}
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "accepted_drafts": None}) + "\n")
    workload = read_mooncake(path)
    write_mooncake(workload, tmp_path / "again.jsonl")
    assert read_mooncake(tmp_path / "again.jsonl").digest == workload.digest
    timeline = play(workload.head(1), mtp(rates=(0.0, 0.0))).timeline
    # Outputs 1 (accepts 1), 3 (1), 5 (1): three rounds of two drafts.
    assert (timeline.draft_rounds, timeline.drafted_tokens, timeline.accepted_tokens) == (3, 6, 3)


def test_worker_streams_and_seeds_decide_and_fast_forward_changes_nothing() -> None:
    config = mtp(k=3, rates=(0.7, 0.5, 0.2), block_size=16, num_gpu_blocks=120)
    runs = [
        run_offline(RunPlan(crowd(40), config, workers=2, fast_forward=fast_forward))
        for fast_forward in (True, False)
    ]
    assert runs[0].facts.digest == runs[1].facts.digest
    assert 0 < runs[0].timeline.accepted_tokens < runs[0].timeline.drafted_tokens


def test_a_budget_of_one_schedules_no_draft() -> None:
    timeline = play(single_turns([1], 3), mtp(max_num_batched_tokens=1, max_num_seqs=1)).timeline
    assert timeline.drafted_tokens == 0
    assert timeline.steps == 3


# ── Bad input ──


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be from 1 to 1,024, got 0"),
        ({"accept_rates": (0.5, 1.5)}, r"accept_rates\[1\] must be in \[0, 1\], got 1.5"),
        ({"accept_rates": (-0.1, 0.0)}, r"accept_rates\[0\] must be in \[0, 1\]"),
        ({"seed": -1}, "seed must be in 0"),
    ],
)
def test_bad_speculation_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**{"method": "mtp", "num_speculative_tokens": 2, **settings})


def test_an_unknown_method_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config.*method"):
        VllmConfig.from_dict({"speculative_config": {"method": "medusa", "num_speculative_tokens": 2}})


def test_vllm_s_speculation_contradicts_the_mocker_s_and_shared_blocks() -> None:
    with pytest.raises(ConfigError, match="aic_nextn contradicts speculative_config"):
        mtp(mocker=MockerSettings(aic_nextn=2))
    with pytest.raises(ConfigError, match="needs kv_manager=native"):
        mtp(kv_manager="kvbm")


def test_a_malformed_recording_is_refused_with_its_file(tmp_path: Path) -> None:
    import gzip

    pair = read_pair(RECORDINGS[0].golden)
    pair["scenario"]["requests"][0]["accept"] = []
    path = tmp_path / "broken.json.gz"
    path.write_bytes(gzip.compress(json.dumps(pair).encode()))
    (recording,) = find_recordings(tmp_path)
    with pytest.raises(InvalidArgument, match=r"broken\.json\.gz: request .*accept"):
        compare_recording(recording)


def test_older_versions_differ_where_they_did() -> None:
    """Before 0.25 nobody was padded, before 0.23 an admission took no blocks ahead."""
    differing = {
        version: sum(compare_recording(r, find_profile(version)).difference is not None for r in RECORDINGS)
        for version in ("0.30", "0.24", "0.22")
    }
    assert differing["0.30"] == 0
    assert 0 < differing["0.24"] <= differing["0.22"]

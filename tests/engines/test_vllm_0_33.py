"""vLLM 0.33 against recordings of its scheduler: every scenario, and every rule that differs from 0.32."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from replay.building import ONE_MS, crowd, sessions, single_turns
from understudy.conformance.compare import compare_recording
from understudy.conformance.recordings import Recording, find_recordings
from understudy.engines.offload_profiles import RELEASES as OFFLOADS
from understudy.engines.profiles import PROFILES, find_profile
from understudy.engines.speculation import SpeculativeConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import ClosedLoop

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-0.33"
RECORDINGS = find_recordings(GOLDEN)
NEW = PROFILES["v0.33"]


def name_of(recording: Recording) -> str:
    return f"{recording.folder.name}/{recording.name}"


@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_every_step_is_the_recorded_one(recording: Recording) -> None:
    outcome = compare_recording(recording)
    assert outcome.profile == "v0.33"
    assert outcome.difference is None, str(outcome.difference)


@pytest.mark.parametrize(
    ("family", "undone"),
    [
        ("priority", {"self_preemption_ends": True}),
        ("lora", {"counts_running_loras": False}),
        ("spec", {"spec_hashes_ahead": False}),
        ("async-spec", {"spec_hashes_ahead": False}),
        ("spec", {"spec_keys_in_update": False}),
    ],
)
def test_without_a_rule_recordings_differ(family: str, undone: dict[str, Any]) -> None:
    profile = msgspec.structs.replace(NEW, **undone)
    folder = [recording for recording in RECORDINGS if recording.folder.name == family]
    assert any(compare_recording(recording, profile).difference is not None for recording in folder)


@pytest.mark.parametrize("undone", ["ranks", "offers_again"])
def test_without_a_rule_of_the_offload_recordings_differ(
    undone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OFFLOADS, 33, msgspec.structs.replace(OFFLOADS[33], **{undone: False}))
    folder = [recording for recording in RECORDINGS if recording.folder.name == "offload"]
    assert any(compare_recording(recording).difference is not None for recording in folder)


def test_the_interval_is_a_setting_since_0_33() -> None:
    assert VllmConfig(vllm_version="0.33", prefill_schedule_interval=4).prefill_schedule_interval == 4
    with pytest.raises(ConfigError, match=r"no effect on a single engine of vLLM 0\.32"):
        VllmConfig(vllm_version="0.32", prefill_schedule_interval=4)


def test_older_profiles_have_none_of_the_rules() -> None:
    for release in range(18, 33):
        old = find_profile(f"0.{release}")
        assert old.self_preemption_ends
        rules = (
            old.counts_running_loras,
            old.has_prefill_interval,
            old.spec_hashes_ahead,
            old.spec_keys_in_update,
        )
        assert rules == (False,) * 4


@pytest.mark.parametrize(
    ("prompts", "outputs", "arrivals", "blocks", "budget"),
    [
        ([26, 18, 34], [39, 19, 36], [3, 4, 7], 30, 10),
        ([9, 34, 8], [48, 44, 11], [2, 6, 18], 24, 6),
    ],
)
def test_the_last_token_that_a_preempted_request_computes_again_is_a_prompt_to_the_interval(
    prompts: list[int], outputs: list[int], arrivals: list[int], blocks: int, budget: int
) -> None:
    config = VllmConfig(
        block_size=4,
        num_gpu_blocks=blocks,
        async_scheduling=False,
        prefill_schedule_interval=3,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        enable_prefix_caching=False,
        max_model_len=100,
        timing=ONE_MS,
    )
    fast, slow = (
        run_offline(RunPlan(single_turns(prompts, outputs, arrivals), config, fast_forward=on))
        for on in (True, False)
    )
    assert slow.timeline.preemptions.sum() > 0
    assert fast.facts.digest == slow.facts.digest


@pytest.mark.parametrize("seed", range(12))
def test_fast_forward_changes_nothing_under_an_interval(seed: int) -> None:
    rng = Random(seed)
    config = VllmConfig(
        vllm_version="0.33",
        block_size=16,
        num_gpu_blocks=rng.choice([40, 120, 400]),
        max_num_batched_tokens=rng.choice([64, 512]),
        max_num_seqs=rng.choice([4, 32]),
        async_scheduling=rng.random() < 0.5,
        prefill_schedule_interval=rng.choice([2, 3, 8]),
        timing=ONE_MS,
    )
    load = rng.choice([None, ClosedLoop(6)])
    workload = crowd(60)
    digests = {
        run_offline(
            RunPlan(workload, config, workers=2, load=load, fast_forward=on, routing=routing)
        ).facts.digest
        for on in (True, False)
        for routing in ("least_loaded",)
    }
    assert len(digests) == 1


def second_hit(version: str, shared_tokens: int, **speculation: Any) -> int:
    """Cached tokens of a prompt whose first tokens another request has computed."""
    config = VllmConfig(
        vllm_version=version,
        block_size=16,
        num_gpu_blocks=2000,
        timing=ONE_MS,
        speculative_config=SpeculativeConfig(method="eagle", num_speculative_tokens=2, **speculation),
    )
    workload = sessions(
        [(shared_tokens, 3, 0)],
        [(2 * shared_tokens, 3, 0)],
        texts=[0, 0],
        arrival_ms=[0, 100],
        trace_block_size=24,
    )
    return int(run_offline(RunPlan(workload, config, check=True)).timeline.cached_tokens_first[1])


def test_a_hit_ends_where_the_token_behind_its_last_block_differs() -> None:
    assert second_hit("0.32", 120) == 6 * 16  # seven blocks are alike; the last is dropped
    assert second_hit("0.33", 120) == 7 * 16
    assert second_hit("0.33", 120, disable_lookahead_block_hashes=True) == 6 * 16
    assert second_hit("0.33", 120, disable_eagle_block_drop=True) == 7 * 16
    assert second_hit("0.33", 144) == 8 * 16  # nine are alike, and the token behind the last is not
    assert second_hit("0.33", 144, disable_eagle_block_drop=True) == 9 * 16

"""The engine on a clock against a slow model of vLLM's loop, which is itself held to the recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.building import engine_profile
from model.clock_loop import ClockLoop, Seen
from model.vllm_config import RECORDED, V0_31, Profile
from understudy.conformance.clock import ClockRecording, ClockScenario, run_clock_scenario
from understudy.workload.scenario import read_file_as

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-clock"


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json.gz")), ids=lambda path: path.name)
def test_the_model_reproduces_every_recording(path: Path) -> None:
    recording = read_file_as(ClockRecording, path)
    scenario = msgspec.to_builtins(recording.scenario)
    names = ("kv_manager", "eviction_policy", "scheduler_reserve_full_isl", "max_loras")
    given_settings = {k: v for k, v in scenario["config"].items() if k not in names}
    for request in scenario["requests"]:
        if request["arrival_time"] is None:
            del request["arrival_time"]
    seen = ClockLoop({**scenario, "config": given_settings}, RECORDED).run()
    theirs = recording.recorded
    assert seen.trace == [batch for batch in theirs.trace if batch[2]]
    assert (seen.first, seen.last, seen.n) == (theirs.first, theirs.last, theirs.n)


TIMES = st.integers(0, 400)


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """A few requests that come, end by EOS or are aborted at any time, in a small pool."""
    priority = draw(st.booleans())
    block_size = draw(st.sampled_from([1, 4, 8]))
    config = {
        "block_size": block_size,
        "num_blocks": 1 + 32 // block_size + draw(st.integers(0, 20)),  # the longest fits, alone
        "max_num_seqs": draw(st.integers(1, 5)),
        "max_num_batched_tokens": draw(st.integers(6, 40)),
        "policy": "priority" if priority else "fcfs",
        "async_scheduling": draw(st.booleans()),
        "enable_prefix_caching": draw(st.booleans()),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "max_model_len": draw(st.sampled_from([30, 131072])),
    }
    requests, aborts = [], []
    for index in range(draw(st.integers(1, 8))):
        limit = draw(st.integers(1, 12))
        arrival = draw(TIMES)
        request = {
            "id": f"r{index}",
            "t": arrival,
            "prompt": [[draw(st.sampled_from([1, 1, 1000 * index + 500])), draw(st.integers(1, 20))]],
            "max_tokens": limit,
            "priority": draw(st.integers(0, 2)) if priority else 0,
        }
        if draw(st.booleans()):
            request["eos_at"] = draw(st.integers(1, limit))
        if draw(st.integers(0, 2)) == 0:
            aborts.append({"id": request["id"], "t": arrival + draw(st.integers(0, 200))})
        requests.append(request)
    return {
        "step_ns": draw(st.sampled_from([1, 10, 33])),
        "per_token_ns": draw(st.sampled_from([0, 1])),
        "config": config,
        "requests": requests,
        "aborts": aborts,
    }


@pytest.mark.parametrize("profile", [RECORDED, V0_31], ids=lambda profile: profile.name)
@given(scenario=scenarios())
@settings(max_examples=40)
def test_every_batch_and_token_comes_when_the_model_says(profile: Profile, scenario: dict[str, Any]) -> None:
    ours = run_clock_scenario(msgspec.convert(scenario, ClockScenario), engine_profile(profile), check=True)
    theirs = ClockLoop(scenario, profile).run()
    assert Seen(ours.first, ours.last, ours.n, list(ours.trace)) == theirs

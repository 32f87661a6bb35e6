"""vLLM's native host offload against the slow model of it, over scenarios that nobody recorded.

All releases, both ways of scheduling, 1, 2 and 4 blocks a chunk, LRU and ARC, priorities, aborts, turns that come back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.vllm_connector import RELEASES
from model.vllm_offload import named, run_offload
from understudy.conformance.offload_recording import OffloadRun, OffloadScenario
from understudy.engines.offload_profiles import offload_profile
from understudy.engines.profiles import find_profile
from understudy.workload.scenario import convert_scenario

STEPS = 400


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """Few blocks and a small host, so that everything that can go wrong does."""
    priority = draw(st.booleans())
    config: dict[str, Any] = {
        "block_size": 4,
        "num_blocks": draw(st.integers(12, 40)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.sampled_from([16, 48, 256])),
        "max_model_len": 4096,
        "async_scheduling": draw(st.booleans()),
        "policy": "priority" if priority else "fcfs",
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.1])),
    }
    offload = {
        "host_chunks": draw(st.integers(1, 40)),
        "blocks_per_chunk": draw(st.sampled_from([1, 2, 4])),
        "eviction_policy": draw(st.sampled_from(["lru", "arc"])),
        "offload_prompt_only": draw(st.booleans()),
        "store_steps": draw(st.integers(0, 4)),
        "load_steps": draw(st.integers(0, 4)),
    }
    requests: list[dict[str, Any]] = []
    most = 4 * (config["num_blocks"] - 1)
    for index in range(draw(st.integers(3, 16))):
        shared = draw(st.sampled_from([0, 8, 12, 20]))
        prompt = [[1000 * draw(st.integers(1, 3)), shared]] if shared else []
        comes_back = draw(st.booleans())
        if requests and comes_back:  # a turn: the prompt and the outputs of another, as far as they came
            before = draw(st.integers(0, len(requests) - 1))
            prompt = [
                *requests[before]["prompt"],
                [1_000_000 + 100_000 * before, requests[before]["max_tokens"]],
            ]
        prompt = [*prompt, [500_000 + 1000 * index, draw(st.integers(1, 24))]]
        tokens = sum(count for _, count in prompt)
        if tokens + 12 > most:
            prompt = [[500_000 + 1000 * index, min(8, most - 12)]]
        request = {
            "id": f"r{index}",
            "arrival_step": draw(st.integers(0, 40)),
            "prompt": prompt,
            "max_tokens": draw(st.integers(1, 10)),
        }
        requests.append(request | ({"priority": draw(st.integers(0, 2))} if priority else {}))
    aborts = [
        {
            "id": f"r{draw(st.integers(0, len(requests) - 1))}",
            "step": step,
            "when": draw(st.sampled_from(["before", "mid"])),
        }
        for step in draw(st.lists(st.integers(1, 50), max_size=4, unique=True))
    ]
    return {
        "name": "random",
        "config": config,
        "offload": offload,
        "max_steps": STEPS,
        "requests": requests,
        "aborts": aborts,
    }


@pytest.mark.parametrize("version", RELEASES)
@settings(max_examples=12)
@given(scenario=scenarios())
def test_every_line_is_the_one_of_the_slow_model(version: str, scenario: dict[str, Any]) -> None:
    run = OffloadRun(
        convert_scenario(OffloadScenario, scenario, Path("random")),
        find_profile(version),
        offload_profile(version),
        check=True,
    )
    *lines, _ = run.lines()
    expected = named(list(run_offload(scenario, RELEASES[version])))
    for ours, theirs in zip(lines, expected, strict=True):
        assert {key: ours[key] for key in theirs} == theirs

"""SGLang's scheduler with sliding windows or states: both pools add up in every step, and what it refuses."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from understudy.conformance.sglang_recording import (
    SglangRequest,
    SglangScenario,
    SglangScenarioConfig,
    run_sglang_scenario,
)
from understudy.errors import ConfigError


def random_config(rng: Random, kind: str) -> dict[str, Any]:
    page = rng.choice([1, 16]) if kind == "window" else 1
    config: dict[str, Any] = {
        "page_size": page,
        "max_total_num_tokens": page * rng.choice([60, 200]) + 400,
        "max_running_requests": rng.choice([2, 8]),
        "chunked_prefill_size": rng.choice([-1, page * 8, 128]),
        "schedule_policy": rng.choice(["fcfs", "lpm", "dfs-weight", "lof"]),
        "radix_eviction_policy": rng.choice(["lru", "lfu", "slru", "fifo"]),
        "overlap": rng.random() < 0.5,
        "enable_mixed_chunk": rng.random() < 0.3,
        "disable_radix_cache": rng.random() < 0.15,
        "schedule_conservativeness": rng.choice([0.3, 1.0]),
    }
    config["max_total_num_tokens"] -= config["max_total_num_tokens"] % page
    if kind == "window":
        window = rng.choice([8, 40, 100])
        return config | {
            "swa_window": window,
            "swa_tokens": (window // page + rng.choice([3, 8, 20])) * page,
            "swa_eviction_interval": rng.choice([1, 16, 128]),
            "release_prefill_swa": rng.random() < 0.3,
        }
    buffered = rng.random() < 0.6
    return config | {
        "mamba_slots": 6 * config["max_running_requests"] + rng.choice([0, 2, 10]),
        "mamba_extra_buffer": buffered,
        "mamba_lazy": buffered and rng.random() < 0.5,
        "mamba_track_interval": rng.choice([64, 128]),
        "mamba_max_states_per_path": rng.choice([-1, 1, 3]),
    }


def random_scenario(kind: str, seed: int) -> SglangScenario:
    """Prompts that share prefixes, and continue the outputs of earlier ones, in small pools."""
    rng = Random(f"{kind} {seed}")
    requests: list[SglangRequest] = []
    for index in range(rng.randint(5, 25)):
        prompt: list[int | tuple[int, int]] = [(rng.choice([100, 5000]), rng.randint(1, 150))]
        if index > 0 and rng.random() < 0.4:
            before = requests[rng.randrange(index)]
            output = 1_000_000 + 100_000 * int(before.id[1:])
            prompt = [*before.prompt, (output, rng.randint(1, max(before.max_tokens, 1)))]
        prompt.append((10_000 + 1000 * index, rng.randint(1, 60)))
        requests.append(
            SglangRequest(
                id=f"r{index:02}",
                prompt=prompt,
                max_tokens=rng.randint(0, 90),
                arrival_step=rng.randint(0, 150),
                eos_at=rng.choice([None, None, rng.randint(1, 40)]),
            )
        )
    config = SglangScenarioConfig(**random_config(rng, kind))
    return SglangScenario(config, requests, f"{kind} {seed}", 1500)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", ["window", "state"])
def test_both_pools_are_conserved(kind: str, seed: int) -> None:
    scenario = random_scenario(kind, seed)
    *_, last = run_sglang_scenario(scenario, check=True)
    end = last["end"]
    # A small window pool parks a chunk for ever, in SGLang too.
    assert end["reason"] in ("done", "out of memory", *(["max_steps"] if kind == "window" else []))
    if end["reason"] == "done":
        assert end["finished"] == len(scenario.requests)


def test_a_match_ends_where_a_whole_window_is_cached() -> None:
    """The window KV in the middle of a prompt is evicted, and so the prompt matches up to its start only."""
    long = [SglangRequest(id="r0", prompt=[(1, 300)], max_tokens=4)]
    again = SglangRequest(id="r1", prompt=[(1, 150), (9000, 10)], max_tokens=4, arrival_step=20)
    config = SglangScenarioConfig(max_total_num_tokens=2000, swa_window=50, swa_tokens=1000)
    lines = [
        line for line in run_sglang_scenario(SglangScenario(config, [*long, again], "", 50)) if "step" in line
    ]
    cached = [line["cached"]["r1"] for line in lines if "r1" in line["cached"]]
    assert cached == [0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"swa_window": 8, "swa_tokens": 64, "mamba_slots": 8}, "mamba_slots: .* leave out swa_window"),
        ({"swa_window": 8, "swa_tokens": 64, "hicache_write_policy": "write_back"}, "swa_window: HiCache"),
        ({"mamba_slots": 8, "hicache_write_policy": "write_back"}, "mamba_slots: HiCache"),
        ({"swa_window": 8, "swa_tokens": 64, "tree": "radix"}, "swa_window: SGLang's older tree"),
        ({"swa_window": 8}, "swa_tokens: "),
        ({"page_size": 16, "swa_window": 8, "swa_tokens": 40}, "swa_tokens: "),
        ({"mamba_slots": 8, "mamba_lazy": True}, "mamba_lazy: needs mamba_extra_buffer"),
        ({"mamba_slots": 8, "mamba_track_interval": 0}, "mamba_track_interval: 0"),
        ({"mamba_slots": 8, "page_size": 16}, "mamba_extra_buffer: pages of 16"),
    ],
)
def test_a_combination_without_rules_is_refused(settings: dict[str, Any], message: str) -> None:
    scenario = SglangScenario(SglangScenarioConfig(**settings), [], "refused", 10)
    with pytest.raises(ConfigError, match=message):
        list(run_sglang_scenario(scenario))

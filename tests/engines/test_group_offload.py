"""vLLM's native host offload with several KV cache groups."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from release.families import FAMILIES
from replay.building import ONE_MS, crowd
from understudy.conformance.compare import compare_offload
from understudy.conformance.group_offload_recording import GroupOffloadRun, GroupOffloadScenario
from understudy.engines.kv_groups import KvCacheGroup
from understudy.engines.offload_profiles import offload_profile
from understudy.engines.profiles import PROFILES
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig

Line = dict[str, Any]
FILES = sorted((Path(__file__).parents[1] / "golden" / "vllm-group-offload").glob("*.json.gz"))
WINDOW = KvCacheGroup(kind="sliding_window", block_size=16, window=64)
FULL = KvCacheGroup(kind="full", block_size=16)
RSWA = KvCacheGroup(kind="rswa", block_size=16, window=64)
RING = KvCacheGroup(kind="circular", block_size=8)
LOCAL = KvCacheGroup(kind="chunked_local", block_size=16, chunk=128)
STATE = KvCacheGroup(kind="mamba", block_size=16)
KEPT = KvCacheGroup(kind="mamba", block_size=16, checkpoint_blocks=1)
REPLAY = KvCacheGroup(kind="sliding_window_mla", block_size=16, window=32, bounded_replay=True)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_every_line_is_the_recorded_one(path: Path) -> None:
    outcome = compare_offload(path, check=True)
    assert outcome.difference is None, str(outcome.difference)


def test_the_recordings_load_evict_and_flush() -> None:
    assert len(FILES) == 29


def test_the_engine_halts_where_vllm_halts() -> None:
    """Load two prompts whose windows need more blocks than vLLM reserves for them."""
    outcome = compare_offload(FILES[0].with_name("halting_offload_8.json.gz"), check=True)
    assert outcome.difference is None, str(outcome.difference)
    assert outcome.note == "halts in step 83: no request fits"


def test_chunks_of_one_end_are_evicted_by_group_whichever_group_was_used_first() -> None:
    """Store the chunks of full attention first: the window's only chunk is that of the prompt's end."""

    def request(number: int, tokens: int, arrival_step: int) -> Line:
        prompt = [number * 1000 + i for i in range(tokens)]
        return {"id": f"r{number}", "prompt": prompt, "max_tokens": 1, "arrival_step": arrival_step}

    drawn = {
        "config": {
            "groups": [
                {"kind": "sliding_window", "block_size": 8, "window": 8},
                {"kind": "full", "block_size": 8},
            ],
            "num_blocks": 40,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 8,
            "max_model_len": 256,
            "async_scheduling": False,
        },
        "offload": {"host_chunks": 5},
        "max_steps": 60,
        "requests": [request(0, 33, 0), request(1, 9, 20)],
    }
    scenario = msgspec.convert(drawn, GroupOffloadScenario)
    run = GroupOffloadRun(scenario, PROFILES["v0.33"], offload_profile("0.33"), check=True)
    jobs = [job for line in run.lines() if "stores" in line for job in line["stores"]]
    slot_of = {
        (job["req"], group, chunk): slot
        for job in jobs
        for group, chunk, slot in zip(job["groups"], job["chunks"], job["host"], strict=True)
    }
    assert [key for key in slot_of if key[0] == "r0"] == [
        *(("r0", 1, chunk) for chunk in range(3)),
        ("r0", 0, 3),
        ("r0", 1, 3),
    ]
    # Both chunks of the second request fit: that of full attention leaves first, then that of the window.
    assert [slot_of["r1", 1, 0], slot_of["r1", 0, 0]] == [slot_of["r0", 1, 3], slot_of["r0", 0, 3]]


@pytest.mark.parametrize(
    ("checkpoints", "unit", "loaded"), [(0, None, 128), (0, 8, 136), (1, None, 128), (1, 8, 0)]
)
def test_a_state_inside_a_block_is_found_only_behind_whole_chunks(
    checkpoints: int, unit: int | None, loaded: int
) -> None:
    """Ask for a prompt of 140 tokens and 60 more, with blocks of 32, after the device has evicted it."""
    prompts = [range(140), range(1000, 1400), range(2000, 2400), [*range(140), *range(500, 560)]]
    state = {"kind": "mamba", "block_size": 32, "checkpoint_blocks": checkpoints, "checkpoint_alignment": 1}
    drawn = {
        "config": {
            "groups": [state, {"kind": "full", "block_size": 32}],
            "num_blocks": 24,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 512,
            "max_model_len": 512,
            "async_scheduling": False,
            "prefix_match_unit": unit,
        },
        "offload": {"host_chunks": 100},
        "max_steps": 100,
        "requests": [
            {"id": str(i), "prompt": [*prompt], "max_tokens": 2, "arrival_step": 20 * i}
            for i, prompt in enumerate(prompts)
        ],
    }
    scenario = msgspec.convert(drawn, GroupOffloadScenario)
    run = GroupOffloadRun(scenario, PROFILES["v0.33"], offload_profile("0.33"), check=True)
    found = [lookup for line in run.lines() for lookup in line.get("lookups", ())]
    assert found[-1] == ["3", 0, loaded]


@pytest.mark.parametrize("family", ["group-offload", "state-offload", "replay-offload"])
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_blocks_and_chunks_are_conserved_in_random_schedules(seed: int, family: str) -> None:
    _, drawn = FAMILIES[family].scenario(seed)
    scenario = msgspec.convert(drawn, GroupOffloadScenario)
    lines = list(GroupOffloadRun(scenario, PROFILES["v0.33"], offload_profile("0.33"), check=True).lines())
    assert lines[-1]["end"]["steps"] == len(lines) - 1
    assert all(line["host_chunks"] <= scenario.offload.host_chunks for line in lines[:-1])


def host(**offload: Any) -> TiersConfig:
    return TiersConfig.from_dict(
        {
            "tiers": [{"tier": "g2", "blocks": offload.pop("blocks", 400)}],
            "kv_bytes_per_token": 1024,
            "offload": {"mode": "vllm", **offload},
        }
    )


def engine(*groups: KvCacheGroup, **settings: Any) -> VllmConfig:
    return VllmConfig(kv_cache_groups=groups, num_gpu_blocks=150, timing=ONE_MS, **settings)


def replay(config: VllmConfig, tiers: TiersConfig | None, **settings: Any) -> OfflineRun:
    return run_offline(RunPlan(crowd(60), config, workers=2, tiers=tiers, **settings))


@pytest.mark.parametrize("seed", range(12))
def test_fast_forward_with_a_host_equals_stepping(seed: int) -> None:
    rng = Random(seed)
    groups = rng.choice(
        [(WINDOW, FULL), (WINDOW, WINDOW, FULL), (FULL, WINDOW), (LOCAL, FULL), (RSWA, WINDOW), (RING, FULL)]
    )
    check_fast_forward(rng, groups)


@pytest.mark.parametrize("seed", range(16))
def test_fast_forward_with_states_or_a_replay_and_a_host_equals_stepping(seed: int) -> None:
    rng = Random(seed)
    groups = [(STATE, FULL), (KEPT, KEPT, FULL), (STATE, WINDOW, FULL), (REPLAY, FULL)][seed % 4]
    unit = rng.choice([None, 8]) if REPLAY not in groups else None
    check_fast_forward(rng, groups, prefix_match_unit=unit)


def check_fast_forward(rng: Random, groups: tuple[KvCacheGroup, ...], **settings: Any) -> None:
    """Compare a replay that fast-forwards with one that steps, with settings and a host drawn at random."""
    config = engine(
        *groups,
        async_scheduling=rng.random() < 0.5,
        prefix_cache_retention_interval=rng.choice([0, None]),
        **settings,
    )
    tiers = host(
        blocks=rng.choice([80, 400]),
        offload_prompt_only=rng.random() < 0.7,
        blocks_per_chunk=rng.choice([1, 1, 2]),
    )
    fast, slow = (
        replay(config, tiers, fast_forward=fast_forward, check=True) for fast_forward in (True, False)
    )
    assert fast.facts.digest == slow.facts.digest


def test_a_host_finds_what_the_device_has_evicted() -> None:
    alone, below = (replay(engine(WINDOW, FULL), tiers) for tiers in (None, host()))
    assert below.facts.tiers is not None
    assert alone.facts.digest != below.facts.digest


@pytest.mark.parametrize("groups", [(STATE, FULL), (REPLAY, FULL)])
def test_a_host_finds_states_and_what_precedes_a_replay(groups: tuple[KvCacheGroup, ...]) -> None:
    tiers = replay(engine(*groups), host()).timeline.tiers
    assert tiers is not None
    assert tiers.totals.onboards > 0


def test_state_groups_of_an_offload_have_one_block_size() -> None:
    wide = KvCacheGroup(kind="mamba", block_size=32)
    with pytest.raises(ConfigError, match="state groups of one block_size, got 16 and 32"):
        replay(engine(STATE, wide, FULL), host())


def test_a_retention_interval_is_a_multiple_of_the_chunks() -> None:
    config = engine(WINDOW, FULL, prefix_cache_retention_interval=48)
    with pytest.raises(ConfigError, match="not a multiple of the offload's chunks of 32"):
        replay(config, host(blocks_per_chunk=2))

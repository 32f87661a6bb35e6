"""Engines with several KV cache groups against recordings of vLLM 0.33, and against the engine with one group."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from release.group_family import draw_groups
from replay.building import ONE_MS, conversations, crowd, single_turns
from understudy import _core
from understudy.conformance.compare import compare_recording
from understudy.conformance.group_recording import (
    GroupRun,
    GroupScenario,
    GroupScenarioConfig,
)
from understudy.conformance.recorder import run_scenario
from understudy.conformance.recordings import Recording, find_recordings
from understudy.engines.kv_groups import KvCacheGroup, kv_cache_groups
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.profiles import PROFILES
from understudy.engines.speculation import SpeculativeConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument, WrongState
from understudy.groups import Layer, groups_of_model, plan_groups
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload import Normal
from understudy.workload.scenario import read_file_as, read_scenario

GOLDEN = Path(__file__).parents[1] / "golden"
RECORDINGS = find_recordings(GOLDEN / "vllm-hybrid")
ONE_GROUP = [
    recording
    for recording in find_recordings(GOLDEN / "vllm-0.33")
    if recording.kind == "steps"
    and not read_scenario(recording.scenario).aborts  # groups were recorded without
]
NEW = PROFILES["v0.33"]
DERIVATIONS = json.loads((GOLDEN / "vllm-hybrid" / "derivations.json").read_text(encoding="utf-8"))


def name_of(recording: Recording) -> str:
    return recording.name


@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_every_step_is_the_recorded_one(recording: Recording) -> None:
    outcome = compare_recording(recording, check=True)
    assert outcome.difference is None, str(outcome.difference)


def test_every_shared_recording_is_here() -> None:
    assert len(RECORDINGS) == 63


@pytest.mark.parametrize("recording", ONE_GROUP, ids=name_of)
def test_one_group_of_full_attention_schedules_as_the_engine_without_groups(recording: Recording) -> None:
    scenario = read_scenario(recording.scenario)
    fields = {name: getattr(scenario.config, name) for name in scenario.config.__struct_fields__}
    group = KvCacheGroup(kind="full", block_size=scenario.config.block_size)
    config = GroupScenarioConfig(**fields, groups=[group])
    grouped = GroupRun(
        GroupScenario(scenario.name, config, scenario.max_steps, scenario.requests), NEW, check=True
    )
    for ours, plain in zip(grouped.lines(), run_scenario(scenario, NEW), strict=True):
        if "end" in plain:
            assert {key: ours["end"][key] for key in plain["end"]} == plain["end"]
            continue
        events = [{key: event[key] for key in ("type", "n", "h")} for event in ours.pop("kv_events")]
        assert events == [{key: e[key] for key in ("type", "n", "h")} for e in plain.pop("kv_events")]
        del ours["held"]
        assert ours == plain


def edit(name: str, **config: Any) -> GroupScenario:
    scenario = read_file_as(GroupScenario, GOLDEN / "vllm-hybrid" / "scenarios" / f"{name}.json")
    return msgspec.structs.replace(scenario, config=msgspec.structs.replace(scenario.config, **config))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"prefix_cache_retention_interval": 40}, "multiple of 16"),
        ({"prefix_match_unit": 5}, "must divide the block size"),
        ({"groups": []}, "give at least one"),
        ({"groups": [KvCacheGroup(kind="mamba", block_size=64, mode="none")]}, "needs mode align"),
        ({"groups": [KvCacheGroup(kind="circular", block_size=8)]}, "can be cached"),
        ({"kv_manager": "kvbm"}, "kv_manager kvbm"),
        ({"eviction_policy": "lru"}, "eviction_policy"),
    ],
)
def test_groups_that_vllm_refuses_are_errors(config: dict[str, Any], problem: str) -> None:
    with pytest.raises((ConfigError, InvalidArgument), match=problem):
        GroupRun(edit("gptoss", **config), NEW)


def test_an_engine_with_one_group_has_no_group_counts() -> None:
    engine = _core.VllmEngine(_core.VllmEngineConfig(), _core.constant_timing(1.0, 1.0))
    with pytest.raises(WrongState, match="one KV cache group"):
        engine.held_by_group()


WINDOW = KvCacheGroup(kind="sliding_window", block_size=16, window=64)
FULL = KvCacheGroup(kind="full", block_size=16)


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ({"kind": "sliding_window", "block_size": 16}, "kind sliding_window needs a window"),
        ({"kind": "full", "block_size": 16, "window": 4}, "kind full has no window"),
        ({"kind": "chunked_local", "block_size": 16}, "kind chunked_local needs a chunk"),
        ({"kind": "full", "block_size": 16, "checkpoint_blocks": 1}, "checkpoint_blocks is for kind mamba"),
        ({"kind": "full", "block_size": 0}, "block_size"),
        ({"kind": "sliding_window", "block_size": 16, "window": 1}, "window must be at least 2, got 1"),
        (
            {"kind": "chunked_local", "block_size": 16, "chunk": 40},
            "chunk must be a multiple of block_size=16",
        ),
        ({"kind": "full", "block_size": 16, "mode": "none"}, "mode is for kind mamba; leave it out"),
        (
            {"kind": "full", "block_size": 16, "checkpoint_alignment": 1},
            "checkpoint_alignment is for kind mamba",
        ),
        (
            {"kind": "mamba", "block_size": 16, "checkpoint_alignment": 0},
            "checkpoint_alignment must be at least 1",
        ),
        (
            {"kind": "mamba", "block_size": 16, "checkpoint_blocks": -1},
            "checkpoint_blocks must be at least 0",
        ),
        (
            {"kind": "mla", "block_size": 16, "bounded_replay": True},
            "bounded_replay is for kind sliding_window_mla",
        ),
    ],
)
def test_a_group_that_contradicts_itself_is_an_error(group: dict[str, Any], problem: str) -> None:
    with pytest.raises((ConfigError, InvalidArgument), match=problem):
        KvCacheGroup(**group)


def test_settings_of_groups_without_groups_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"^prefix_match_unit needs KV cache groups"):
        VllmConfig(prefix_match_unit=16).core_config(None, 0)
    with pytest.raises(ConfigError, match=r"^prefix_cache_retention_interval needs KV cache groups"):
        VllmConfig(prefix_cache_retention_interval=None).live_config()
    with pytest.raises(ConfigError, match="prefix_match_unit must be at least 1, got 0"):
        VllmConfig(prefix_match_unit=0, kv_cache_groups=(FULL,))


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (
            {"speculative_config": SpeculativeConfig(method="mtp", num_speculative_tokens=2)},
            "speculative_config",
        ),
        ({"mocker": MockerSettings(aic_nextn=1)}, "aic_nextn"),
        ({"kv_manager": "kvbm"}, "kv_manager=kvbm"),
        ({"eviction_policy": "lru"}, "eviction_policy"),
    ],
)
def test_parts_that_do_not_work_with_groups_are_refused_by_name(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^{part} does not work with several KV cache groups yet; leave it out"
    ):
        VllmConfig(kv_cache_groups=(WINDOW, FULL), **settings)


def test_block_size_is_the_groups_unit_of_hashing() -> None:
    large = msgspec.structs.replace(FULL, block_size=48)
    assert VllmConfig(kv_cache_groups=(WINDOW, large)).block_size == 16
    with pytest.raises(ConfigError, match="block_size=32 contradicts kv_cache_groups"):
        VllmConfig(kv_cache_groups=(WINDOW, FULL), block_size=32)
    given = {"kv_cache_groups": [{"kind": "full", "block_size": 16}], "block_size": 64}
    with pytest.raises(ConfigError, match="block_size=64 contradicts kv_cache_groups"):
        VllmConfig.from_dict(given)
    assert VllmConfig.from_dict({**given, "block_size": 16}).block_size == 16


def test_releases_without_recordings_of_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_groups needs vLLM"):
        VllmConfig(kv_cache_groups=(WINDOW, FULL), vllm_version="0.32")


def test_groups_are_read_from_settings_by_name() -> None:
    settings = {"kv_cache_groups": [{"kind": "sliding_window", "block_size": 16, "window": 64}]}
    assert VllmConfig.from_dict(settings).kv_cache_groups == (WINDOW,)


def test_an_error_names_the_group() -> None:
    listed = [{"kind": "full", "block_size": 16}, {"kind": "sliding_window", "block_size": 16, "window": 1}]
    with pytest.raises(ConfigError, match=r"^kv_cache_groups\[1\]\.window must be at least 2, got 1"):
        VllmConfig.from_dict({"kv_cache_groups": listed})


def test_a_state_without_prefix_caching_has_a_block_that_the_others_divide() -> None:
    plan = groups_of_model(
        "Qwen3-Next-80B-A3B", memory_bytes=40 << 30, max_model_len=262144, prefix_caching=False
    )
    assert plan.hash_block_size > 2**20
    config = VllmConfig(kv_cache_groups=kv_cache_groups(plan), enable_prefix_caching=False)
    assert config.block_size == config.kv_cache_groups[0].block_size == -(-262144 // 544) * 544
    assert run_offline(RunPlan(crowd(10), config)).facts.digest is not None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_replay_with_one_group_of_full_attention_equals_one_without_groups(asynchronous: bool) -> None:
    workload = crowd(60)
    plain = VllmConfig(block_size=16, num_gpu_blocks=60, async_scheduling=asynchronous, timing=ONE_MS)
    grouped = msgspec.structs.replace(plain, kv_cache_groups=(FULL,))
    runs = [run_offline(RunPlan(workload, config, workers=2)) for config in (plain, grouped)]
    assert runs[0].facts.digest == runs[1].facts.digest
    assert runs[0].facts.digest is not None


def test_a_replay_with_windows_passes_every_check_and_keeps_its_blocks() -> None:
    config = VllmConfig(kv_cache_groups=(WINDOW, WINDOW, FULL), num_gpu_blocks=200, timing=ONE_MS)
    run = run_offline(RunPlan(crowd(60), config, workers=2, check="deep"))
    assert run.facts.digest == run_offline(RunPlan(crowd(60), config, workers=2)).facts.digest


def random_engine(seed: int) -> VllmConfig:
    rng = Random(seed)
    groups = tuple(msgspec.convert(group, KvCacheGroup) for group in draw_groups(rng))
    common = math.lcm(*(group.block_size for group in groups))
    limited = any(group.kind in ("sliding_window", "sliding_window_mla", "mamba") for group in groups)
    fine = any(group.kind == "mamba" for group in groups) and len(groups) > 1 and rng.random() < 0.5
    return VllmConfig(
        kv_cache_groups=groups,
        prefix_cache_retention_interval=rng.choice([0, None, common] if limited else [0, None]),
        prefix_match_unit=16 if fine else None,
        num_gpu_blocks=rng.choice([150, 400, 3000]),
        max_num_batched_tokens=rng.choice([256, 1024]),
        max_num_seqs=rng.choice([8, 256]),
        async_scheduling=rng.random() < 0.5,
        enable_prefix_caching=rng.random() < 0.85,
        timing=ONE_MS,
        max_model_len=2000,
    )


@pytest.mark.parametrize("block", range(8))
def test_fast_forward_over_groups_equals_stepping(block: int) -> None:
    for seed in range(block * 8, block * 8 + 8):
        engine = random_engine(seed)
        fast, slow = (
            run_offline(RunPlan(crowd(40), engine, workers=2, fast_forward=fast_forward))
            for fast_forward in (True, False)
        )
        assert fast.facts.digest == slow.facts.digest, seed


@pytest.mark.parametrize("block", range(4))
def test_fast_forward_past_a_request_that_does_not_fit_equals_stepping(block: int) -> None:
    hits_are_evicted = (1108, 1122, 1140, 1181)[block]
    for seed in (*range(1000 + block * 6, 1006 + block * 6), hits_are_evicted):
        rng = Random(seed)
        engine = msgspec.structs.replace(
            random_engine(seed),
            num_gpu_blocks=rng.choice([100, 150, 300]),
            watermark=rng.choice([0.0, 0.05]),
            scheduler_reserve_full_isl=rng.random() < 0.7,
            long_prefill_token_threshold=rng.choice([0, 100]),
        )
        workload = conversations(30, output_tokens=Normal(mean=rng.choice([20, 60, 150]), std=20))
        fast, slow = (
            run_offline(RunPlan(workload, engine, fast_forward=fast_forward))
            for fast_forward in (True, False)
        )
        assert fast.facts.digest == slow.facts.digest, seed


def test_deep_checks_of_groups_find_nothing() -> None:
    for seed in range(6):
        run_offline(RunPlan(crowd(20), random_engine(seed), workers=2, check="deep"))


def test_the_plan_of_a_model_gives_the_groups_of_its_engine() -> None:
    plan = groups_of_model("gpt-oss-20b", memory_bytes=8 << 30, max_model_len=4096)
    groups = kv_cache_groups(plan)
    assert [(group.kind, group.block_size, group.window) for group in groups] == [
        ("sliding_window", 16, 128),
        ("full", 16, None),
    ]
    engine = VllmConfig(kv_cache_groups=groups, num_gpu_blocks=plan.num_blocks - 1, max_model_len=4096)
    assert engine.block_size == plan.hash_block_size
    assert run_offline(RunPlan(crowd(10), engine)).facts.digest is not None


@pytest.mark.parametrize("entry", DERIVATIONS, ids=lambda entry: entry["model"])
def test_every_recorded_plan_gives_groups_that_the_engine_accepts(entry: dict[str, Any]) -> None:
    layers = [msgspec.convert(layer, Layer) for count, layer in entry["layers"] for _ in range(count)]
    names = ("memory_bytes", "max_model_len", "max_num_batched_tokens", "async_scheduling", "prefix_caching")
    plan = plan_groups(
        layers, **{name: entry[name] for name in (*names, "layout")}, disable_hybrid=entry["disable_hybrid"]
    )
    engine = VllmConfig(
        kv_cache_groups=kv_cache_groups(plan),
        enable_prefix_caching=entry["prefix_caching"],
        async_scheduling=entry["async_scheduling"],
        max_model_len=entry["max_model_len"],
        max_num_batched_tokens=entry["max_num_batched_tokens"],
    )
    layout = _core.GroupLayout(engine.native())
    assert layout.hash_block_size == entry["hash_block_size"]
    assert layout.scheduler_block_size == entry["scheduler_block_size"]
    assert layout.blocks_per_request == sum(group["blocks_per_request"] for group in entry["groups"])


def test_many_continuations_of_one_prefix_are_found_as_with_one_group() -> None:
    """Let 200 prompts differ from their sixth block on: the index has one home for their keys. Then repeat them."""
    contents = [[0, 1, 2, 3, 4, *range(10 * n, 10 * n + 4)] for n in range(1, 201)]
    load = single_turns(
        [145] * 400,
        content=[[*content, 9_000 + n] for n, content in enumerate(contents * 2)],
        arrival_ms=[10.0 * n for n in range(400)],
    )
    plain = VllmConfig(block_size=16, num_gpu_blocks=1500, timing=ONE_MS)
    one, listed = (
        run_offline(RunPlan(load, engine, check=True))
        for engine in (plain, msgspec.structs.replace(plain, kv_cache_groups=(FULL,)))
    )
    assert one.timeline.cached_tokens_first.tolist() == listed.timeline.cached_tokens_first.tolist()
    assert one.timeline.cached_tokens_first[200:].sum() > 20_000

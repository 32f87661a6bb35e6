"""Replays of models with several KV groups and tiers: fast-forward, conservation, reports and refusals."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from replay.building import ONE_MS, crowd
from understudy.engines.kv_groups import KvCacheGroup, kv_cache_groups
from understudy.engines.vllm_config import VllmConfig
from understudy.groups import groups_of_model
from understudy.router import FleetView, Router, RouteRequest
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.settings import ReplaySettings
from understudy.tiers.gpu import GpuSettings
from understudy.tiers.plan import TierPlan
from understudy.tiers.settings import TiersConfig
from understudy.workload import Normal

WINDOW = KvCacheGroup(kind="sliding_window", block_size=16, window=64)
WIDE = KvCacheGroup(kind="sliding_window", block_size=32, window=100)
FULL = KvCacheGroup(kind="full", block_size=16)
LOCAL = KvCacheGroup(kind="chunked_local", block_size=16, chunk=128)
STATE = KvCacheGroup(kind="mamba", block_size=16)
CHECKPOINT = KvCacheGroup(kind="mamba", block_size=32, checkpoint_blocks=1)
RSWA = KvCacheGroup(kind="rswa", block_size=16, window=40)
REPLAYED = KvCacheGroup(kind="sliding_window_mla", block_size=16, window=64, bounded_replay=True)
RING = KvCacheGroup(kind="circular", block_size=8)
CACHED_BY_POSITION = [(WINDOW, FULL), (WINDOW, WINDOW, FULL), (FULL, WIDE), (LOCAL, FULL)]
OTHERS = [
    (STATE, STATE, FULL),
    (CHECKPOINT, FULL),  # hits end inside blocks
    (STATE, FULL, WINDOW),
    (RSWA, FULL),
    (FULL, REPLAYED, RING),
]


def below(g2: int = 400, g3: int | None = None, g4: int | None = None, **offload: Any) -> TiersConfig:
    tiers = [
        {"tier": name, "blocks": blocks} for name, blocks in (("g2", g2), ("g3", g3), ("g4", g4)) if blocks
    ]
    return TiersConfig.from_dict({"tiers": tiers, "kv_bytes_per_token": 65536, "offload": offload})


def engine(*groups: KvCacheGroup, **settings: Any) -> VllmConfig:
    return VllmConfig(kv_cache_groups=groups, timing=ONE_MS, **{"num_gpu_blocks": 150, **settings})


def replay(config: VllmConfig, tiers: TiersConfig | None, **settings: Any) -> OfflineRun:
    return run_offline(RunPlan(crowd(60), config, workers=2, tiers=tiers, **settings))


def draw(rng: Random, layouts: list[tuple[KvCacheGroup, ...]], **more: Any) -> tuple[VllmConfig, TiersConfig]:
    config = engine(
        *rng.choice(layouts),
        async_scheduling=rng.random() < 0.5,
        prefix_cache_retention_interval=rng.choice([0, None]),
        max_num_batched_tokens=rng.choice([64, 2048]),
        **more,
    )
    mode = rng.choice(["write_through", "write_through", "evict"])
    tiers = below(
        rng.choice([60, 400]),
        rng.choice([None, 300]),
        rng.choice([None, 3000]),
        mode=mode,
        placement=rng.choice(["inclusive", "exclusive"]) if mode == "evict" else "inclusive",
        min_reuse=rng.choice([0, 0, 0, 1]),
        recompute_fallback=rng.random() < 0.2,
        offload_batch_size=rng.choice([2, 32]),
        onboard_failure_rate=rng.choice([0.0, 0.3]),
    )
    return config, tiers


def check_draw(config: VllmConfig, tiers: TiersConfig) -> None:
    fast, slow = (
        replay(config, tiers, fast_forward=fast_forward, check=True) for fast_forward in (True, False)
    )
    assert fast.facts.digest == slow.facts.digest
    assert fast.facts.kv_groups == slow.facts.kv_groups
    assert fast.timeline.tiers is not None
    assert fast.timeline.tiers.totals.offloaded_blocks > 0


@pytest.mark.parametrize("seed", range(16))
def test_fast_forward_equals_stepping_and_no_block_is_lost(seed: int) -> None:
    check_draw(*draw(Random(f"tiered groups {seed}"), CACHED_BY_POSITION))


@pytest.mark.parametrize("seed", range(16))
def test_the_same_with_states_rswa_and_groups_that_are_not_cached(seed: int) -> None:
    check_draw(*draw(Random(f"tiered states {seed}"), OTHERS, num_gpu_blocks=70))


NARROW = KvCacheGroup(kind="sliding_window", block_size=4, window=33)
UNDER_VLLM = [
    (NARROW,),
    (msgspec.structs.replace(STATE, block_size=1), KvCacheGroup(kind="mla", block_size=3)),
    (msgspec.structs.replace(STATE, block_size=4), NARROW),
    (WINDOW, FULL),
    (LOCAL, msgspec.structs.replace(CHECKPOINT, block_size=16), WINDOW),
]


@pytest.mark.parametrize("seed", range(20))
def test_fast_forward_equals_stepping_under_vllms_offload(seed: int) -> None:
    rng = Random(f"groups under vLLM's offload {seed}")
    groups = UNDER_VLLM[seed % len(UNDER_VLLM)]
    config = engine(
        *groups,
        num_gpu_blocks=rng.choice([3000, 4500]) // len(groups) // min(group.block_size for group in groups),
        async_scheduling=rng.random() < 0.5,
        prefix_cache_retention_interval=rng.choice([0, None]),
        max_num_batched_tokens=(budget := rng.choice([64, 2048])),
        max_num_seqs=min(rng.choice([4, 256]), budget),
    )
    tiers = below(rng.choice([60, 400]), mode="vllm")
    load = crowd(60, output_tokens=Normal(mean=40, std=10))
    fast, slow = (
        run_offline(
            RunPlan(
                load,
                config,
                workers=2,
                tiers=tiers,
                events=True,
                fast_forward=fast_forward,
                check=fast_forward,
            )
        )
        for fast_forward in (True, False)
    )
    assert fast.facts.digests == slow.facts.digests
    assert fast.facts.kv_groups == slow.facts.kv_groups


def test_a_host_finds_what_the_device_has_evicted() -> None:
    run = replay(engine(WINDOW, FULL), below(recompute_fallback=False))
    assert run.timeline.tiers is not None
    assert run.timeline.tiers.totals.onboarded_blocks > 0


@pytest.mark.parametrize("mode", ["write_through", "evict"])
def test_a_host_finds_states_that_the_device_has_evicted(mode: str) -> None:
    config = engine(STATE, STATE, FULL, num_gpu_blocks=80)
    with_host = replay(config, below(2000, recompute_fallback=False, mode=mode))
    hits = [int(run.timeline.cached_tokens_first.sum()) for run in (replay(config, None), with_host)]
    assert hits[1] > hits[0]


@pytest.mark.parametrize("model", ["Qwen3-Next-80B-A3B", "Kimi-Linear-48B-A3B", "Nemotron-H-8B"])
@pytest.mark.parametrize("mode", ["write_through", "evict"])
def test_models_with_states_hit_more_with_a_host(model: str, mode: str) -> None:
    plan = groups_of_model(model, memory_bytes=1 << 50, max_model_len=8192, max_num_batched_tokens=8192)
    groups = kv_cache_groups(plan)
    config = engine(*groups, num_gpu_blocks=8 * len(groups) + 16384 // plan.hash_block_size)
    prompts = crowd(60, prompt_tokens=Normal(mean=4000, std=800))
    tiers = below(5000, recompute_fallback=False, mode=mode)
    fast = msgspec.structs.replace(tiers, kv_bytes_per_token=64)
    runs = [run_offline(RunPlan(prompts, config, tiers=given, check=True)) for given in (None, fast)]
    hits = [int(run.timeline.cached_tokens_first.sum()) for run in runs]
    assert hits[1] > 1.3 * hits[0]


def test_an_unlimited_host_has_room_for_the_blocks_of_all_groups() -> None:
    tiers = TiersConfig.from_dict(
        {"tiers": [{"tier": "g2", "blocks": "unlimited"}], "kv_bytes_per_token": 65536}
    )
    run = replay(engine(WINDOW, WINDOW, FULL, prefix_cache_retention_interval=None), tiers)
    assert run.timeline.tiers is not None
    assert run.timeline.tiers.totals.dropped_blocks == 0
    assert run.timeline.tiers.tiers[1].evicted_blocks == 0


def test_a_block_of_a_model_has_the_bytes_of_the_pool_that_its_groups_share() -> None:
    given = [
        "model=gpt-oss-120b",
        "gpu.name=H200",
        "engine.block_size=16",
        'tiers=[{"tier": "g2", "blocks": 9}]',
    ]
    settings = ReplaySettings.read(None, {}, given)
    assert isinstance(settings.engine, VllmConfig)
    assert len(settings.engine.kv_cache_groups) == 2
    plan = TierPlan.of(settings.tiers, settings.engine.block_size)
    assert plan is not None
    groups = GpuSettings(name="H200").groups("gpt-oss-120b", None, max_model_len=131072, block_size=16)
    assert plan.block_bytes == groups.bytes_per_block


class First(Router):
    """Sends every request to the first worker."""

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        assert request.prompt_tokens > 0
        return int(view.ready[0])


@pytest.mark.parametrize("routing", [First(), "least_loaded"])
def test_choices_are_recorded_next_to_groups_and_tiers_without_a_change_of_the_run(routing: Any) -> None:
    given = (engine(WINDOW, FULL), below())
    kept = replay(*given, routing=routing, keep_candidates=True)
    assert kept.facts.digest == replay(*given, routing=routing).facts.digest
    assert kept.choices is not None
    assert kept.choices.true_overlap_blocks.sum() > 0

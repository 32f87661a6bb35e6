"""Pools for windows and states of an SGLang engine on a clock: sizes from models, runs, and what is refused."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from replay.building import ONE_MS
from replay.test_sglang_fast_forward import random_run
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.sglang_pools import choose_strategy, count_states_per_request, count_window_tokens
from understudy.errors import ConfigError
from understudy.groups import layers_of_model
from understudy.router import KvRouting
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.settings import ReplaySettings
from understudy.tiers.gpu import GpuSettings
from understudy.workload import Workload


def engine_of(*assignments: str) -> SglangConfig:
    engine = ReplaySettings.read(None, {}, ["engine.engine_type=sglang", *assignments]).engine
    assert isinstance(engine, SglangConfig)
    return engine


def test_window_layers_have_a_share_of_the_full_pool() -> None:
    engine = engine_of("model=gpt-oss-20b", "gpu.name=H200", "engine.page_size=64")
    layers = layers_of_model("gpt-oss-20b", block_size=1)
    full = sum(layer.page_bytes for layer in layers if layer.is_full)
    windowed = sum(layer.page_bytes for layer in layers if not layer.is_full)
    memory = GpuSettings(name="H200").with_share(engine.memory_share)
    tokens = memory.kv_memory("gpt-oss-20b", None, step_tokens=8192) / (full + 0.8 * windowed)
    assert engine.swa_window == 127  # SGLang leaves out the newest of 128 tokens
    assert engine.num_gpu_blocks == pytest.approx(tokens // 64, abs=1)
    assert count_window_tokens(engine) == int(engine.num_gpu_blocks * 64 * 0.8) // 64 * 64


def test_states_take_their_share_of_the_memory_and_limit_running_requests() -> None:
    model = ("model=qwen3-next-80b-a3b", "gpu.name=H200", "gpu.tensor_parallel_size=2")
    engine = engine_of(*model)
    layers = layers_of_model("qwen3-next-80b-a3b", block_size=1, tensor_parallel=2)
    state = sum(layer.own_page_bytes for layer in layers if layer.kind == "mamba")
    full = sum(layer.page_bytes for layer in layers if layer.is_full)
    assert engine.max_mamba_cache_size is not None
    share = engine.max_mamba_cache_size * state / (engine.num_gpu_blocks * full)
    assert share == pytest.approx(0.9, rel=0.01)
    assert engine_of(*model, "engine.max_mamba_cache_size=64").max_mamba_cache_size == 64
    assert engine_of(*model, "engine.mamba_full_memory_ratio=0.3").num_gpu_blocks > engine.num_gpu_blocks


@pytest.mark.parametrize(
    "model", [("model=gemma-3-27b-it",), ("model=gpt-oss-20b", "gpu.disable_hybrid_kv_cache_manager=true")]
)
def test_other_models_with_windows_have_one_full_pool(model: tuple[str, ...]) -> None:
    assert engine_of(*model, "gpu.name=H200").swa_window is None


@pytest.mark.parametrize(
    ("settings", "strategy", "slots"),
    [
        ({}, "extra_buffer", 5),
        ({"disable_overlap_schedule": True}, "no_buffer", 3),
        ({"disable_overlap_schedule": True, "block_size": 16}, "extra_buffer", 4),
        ({"mamba_radix_cache_strategy": "extra_buffer_lazy"}, "extra_buffer_lazy", 4),
        ({"disable_radix_cache": True}, "no_buffer", 1),
    ],
)
def test_states_are_buffered_where_overlap_or_pages_need_it(
    settings: dict[str, Any], strategy: str, slots: int
) -> None:
    engine = SglangConfig(max_mamba_cache_size=40, **settings)
    assert choose_strategy(engine) == strategy
    assert count_states_per_request(engine) == slots


def random_pools(seed: int) -> tuple[Workload, SglangConfig, dict[str, Any]]:
    """A random run, with windows or states in small pools."""
    rng = Random(f"pools {seed}")
    workload, engine, how = random_run(seed)
    how.pop("tiers", None)
    if seed % 2:
        size, ratio = rng.choice([4, 20]), rng.choice([0.6, 0.8, 1.0])
        return workload, msgspec.structs.replace(engine, swa_window=size, swa_full_tokens_ratio=ratio), how
    slots = 6 * (engine.max_num_seqs or 8) + rng.choice([0, 4, 30])
    return workload, msgspec.structs.replace(engine, max_mamba_cache_size=slots), how


@pytest.mark.parametrize("first", [0, 8, 16])
def test_runs_with_both_pools_end_and_equal_stepping(first: int) -> None:
    for seed in range(first, first + 8):
        workload, engine, how = random_pools(seed)
        run = run_offline(RunPlan(workload, engine, check=True, **how))
        stepped = run_offline(RunPlan(workload, engine, fast_forward=False, **how))
        assert run.facts.digest == stepped.facts.digest, seed


def test_a_kv_router_knows_the_full_kv_of_windows_and_states_at_every_step() -> None:
    """`check` compares the index that published events build with the engine's tree after each step."""
    routed = 0
    for seed in range(12):
        workload, engine, how = random_pools(seed)
        if engine.disable_radix_cache:
            continue
        how |= {"routing": KvRouting(), "workers": 2, "check": True}
        observed = run_offline(RunPlan(workload, engine, events=True, **how))
        shown = run_offline(RunPlan(workload, engine, **how))  # the router reads the trees themselves
        assert observed.facts.digest == shown.facts.digest, seed
        routed += int(observed.timeline.evictions > 0)
    assert routed >= 2


def test_a_prefix_without_its_window_is_published_and_no_hit() -> None:
    """A tombstone publishes nothing: the router counts the prefix, and the engine computes it again."""
    engine = SglangConfig(
        block_size=4,
        num_gpu_blocks=60,
        swa_window=8,
        swa_full_tokens_ratio=0.2,
        max_num_seqs=2,
        timing=ONE_MS,
    )
    prompts = [list(range(at, at + 40)) for at in (0, 100, 200, 300)]
    prompts.append([*prompts[0][:20], 999])
    workload = Workload(
        arrival_ns=np.arange(5) * 500_000_000,
        prompt_tokens=np.array([len(prompt) for prompt in prompts], np.int32),
        output_tokens=np.full(5, 2, np.int32),
        hash_offsets=np.cumsum([0, *(len(prompt) for prompt in prompts)]),
        hash_ids=np.array([token for prompt in prompts for token in prompt], np.uint32),
        trace_block_size=1,
    )
    run = run_offline(RunPlan(workload, engine, events=True, check=True, routing=KvRouting()))
    full = run_offline(RunPlan(workload, msgspec.structs.replace(engine, swa_window=None), check=True))
    assert full.timeline.cached_tokens_first[4] == 20
    assert run.timeline.cached_tokens_first[4] == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"swa_window": 0}, "swa_window"),
        ({"swa_window": 128, "swa_full_tokens_ratio": 1.5}, "swa_full_tokens_ratio must be above 0"),
        (
            {"swa_window": 128, "num_gpu_blocks": 150},
            "a window of 128 tokens and a page of 1 do not fit into the 120",
        ),
        ({"max_mamba_cache_size": 4}, "4 slots hold no request, which needs 5; give at least 5"),
        ({"max_mamba_cache_size": 40, "mamba_track_interval": 0}, "mamba_track_interval"),
        ({"max_mamba_cache_size": 40, "mamba_radix_cache_strategy": "no_buffer"}, "turns overlap off"),
        (
            {"max_mamba_cache_size": 40, "mamba_radix_cache_strategy": "no_buffer", "block_size": 16},
            "contradicts block_size=16; choose extra_buffer",
        ),
        ({"mamba_full_memory_ratio": 0.0}, "mamba_full_memory_ratio must be a finite number above 0"),
        ({"max_mamba_cache_size": 40, "swa_window": 128}, "a model with both is not simulated"),
    ],
)
def test_pools_that_sglang_lacks_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SglangConfig(**settings)


def test_a_host_cache_below_windows_is_refused() -> None:
    settings = ("engine.swa_window=128", "tiers.g2.bytes=1GB", "kv_bytes_per_token=1024")
    read = ReplaySettings.read(None, {}, ["engine.engine_type=sglang", *settings])
    workload, _, _ = random_run(1)
    with pytest.raises(ConfigError, match="swa_window contradicts g2"):
        run_offline(RunPlan(workload, read.engine, tiers=read.tiers))

"""Hits and held blocks that a run with several KV cache groups reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

import understudy
from replay.building import ONE_MS, conversations, crowd
from understudy.engines.vllm_config import VllmConfig
from understudy.report import group_verdicts
from understudy.report.html import page
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig
from understudy.workload import Normal, Poisson

if TYPE_CHECKING:
    from understudy.run.group_facts import GroupFacts

WINDOW = understudy.KvCacheGroup(kind="sliding_window", block_size=16, window=64)
FULL = understudy.KvCacheGroup(kind="full", block_size=16)
MLA = understudy.KvCacheGroup(kind="mla", block_size=32)
STATE = understudy.KvCacheGroup(kind="mamba", block_size=16)
HOST = TiersConfig.from_dict(
    {"tiers": [{"tier": "g2", "blocks": 4000}], "kv_bytes_per_token": 1024, "offload": {"mode": "vllm"}}
)


def facts_of(groups: GroupFacts | None) -> GroupFacts:
    assert groups is not None
    return groups


@pytest.mark.parametrize("groups", [(WINDOW, FULL), (FULL, MLA), (STATE, FULL)])
def test_hits_of_vllms_host_count(groups: tuple[understudy.KvCacheGroup, ...]) -> None:
    engine = VllmConfig(kv_cache_groups=groups, num_gpu_blocks=400)
    report = understudy.replay(conversations(30), engine, tiers=HOST)
    facts = facts_of(report.run.kv_groups)
    alone = facts_of(understudy.replay(conversations(30), engine).run.kv_groups)
    assert facts.hit_ratio == pytest.approx(report.prefix_hit_ratio.total)
    assert facts.hit_ratio > alone.hit_ratio + 0.05
    assert facts.full_attention_hit_ratio is not None
    assert facts.full_attention_hit_ratio >= facts.hit_ratio


def test_a_hit_that_vllms_host_makes_longer_is_not_shortened() -> None:
    engine = VllmConfig(kv_cache_groups=(FULL, WINDOW), num_gpu_blocks=400)
    load = conversations(30, output_tokens=Normal(mean=150, std=10))
    alone, kept = (understudy.replay(load, engine, tiers=tiers).run.kv_groups for tiers in (None, HOST))
    assert facts_of(kept).shortened_ratio < facts_of(alone).shortened_ratio


@pytest.mark.parametrize("groups", [(WINDOW, STATE), (WINDOW, msgspec.structs.replace(WINDOW, window=128))])
def test_what_full_attention_had_is_absent_without_it(groups: tuple[understudy.KvCacheGroup, ...]) -> None:
    engine = VllmConfig(kv_cache_groups=groups, num_gpu_blocks=2000)
    report = understudy.replay(conversations(30, output_tokens=Normal(mean=150, std=10)), engine)
    assert report.to_dict()["run"]["kv_groups"]["full_attention_hit_ratio"] is None
    assert "full attention alone" not in page(report)
    assert group_verdicts.group_tail_gone(report) is None


def test_held_blocks_are_distinct_blocks_of_the_device() -> None:
    """Send many requests with equal prefixes at once, for which the device has few blocks."""
    engine = VllmConfig(kv_cache_groups=(WINDOW, FULL), num_gpu_blocks=120, timing=ONE_MS)
    load = crowd(80, arrivals=Poisson(qps=2000))
    fast, slow = (run_offline(RunPlan(load, engine, fast_forward=on, check=on)) for on in (True, False))
    facts = facts_of(fast.facts.kv_groups)
    assert facts == slow.facts.kv_groups
    for group in facts.groups:
        assert max(group.held_blocks) <= group.held_blocks_peak <= 120
        assert group.held_blocks[-1] == 0
    assert facts.groups[1].held_blocks_peak > 60


def test_blocks_that_are_copied_behind_a_hit_inside_them_count_once() -> None:
    """Let hits end with a chunk, inside a block of full attention."""
    local = understudy.KvCacheGroup(kind="chunked_local", block_size=16, chunk=144)
    wide = understudy.KvCacheGroup(kind="full", block_size=32)
    engine = VllmConfig(kv_cache_groups=(local, wide, FULL), num_gpu_blocks=225, timing=ONE_MS)
    for seed in range(4):
        load = conversations(15, prompt_tokens=Normal(mean=900, std=100), content_seed=seed)
        facts = facts_of(run_offline(RunPlan(load, engine, check=True)).facts.kv_groups)
        assert [group.held_blocks[-1] for group in facts.groups] == [0, 0, 0]


def test_the_peak_of_a_short_run_is_found() -> None:
    """Run one request alone: its prompt of 100 tokens and the first 12 behind it are in 7 blocks."""
    engine = VllmConfig(kv_cache_groups=(WINDOW, FULL), num_gpu_blocks=100, timing=ONE_MS)
    load = crowd(1, prompt_tokens=Normal(mean=100, std=0), output_tokens=Normal(mean=13, std=0))
    facts = facts_of(run_offline(RunPlan(load, engine)).facts.kv_groups)
    assert [group.held_blocks_peak for group in facts.groups] == [7, 7]
    assert max(facts.groups[1].held_blocks) == 7

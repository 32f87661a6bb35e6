"""Hits and held blocks that a run with several KV cache groups reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

import understudy
from replay.building import conversations
from understudy.engines.vllm_config import VllmConfig
from understudy.report import group_verdicts
from understudy.report.html import page
from understudy.tiers.settings import TiersConfig
from understudy.workload import Normal

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

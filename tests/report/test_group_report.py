"""Reports of engines with several KV cache groups: no bound of one group, verdict, card and remedies."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import understudy
from replay.building import conversations
from understudy.engines.vllm_config import VllmConfig
from understudy.report.html import page
from understudy.workload import Normal

if TYPE_CHECKING:
    from understudy.report import Report

WINDOW = understudy.KvCacheGroup(kind="sliding_window", block_size=16, window=64)
FULL = understudy.KvCacheGroup(kind="full", block_size=16)
LOAD = conversations(30, output_tokens=Normal(mean=150, std=10))


@cache
def grouped(*groups: understudy.KvCacheGroup, blocks: int = 600, workers: int = 1) -> Report:
    engine = VllmConfig(kv_cache_groups=groups, num_gpu_blocks=blocks)
    return understudy.replay(LOAD, engine, workers=workers)


def test_groups_have_no_bound_of_one_group_and_no_verdict_from_it() -> None:
    report = grouped(WINDOW, FULL, workers=2)
    assert report.kv.evictions
    assert report.unlimited_hit_ratio is None
    assert report.routed_hit_ratio is None
    assert report.hit_curve is None
    rules = {verdict.rule for verdict in report.verdicts}
    assert not rules & {"cache_too_small", "scattered_prefixes"}
    assert "unlimited_hit_ratio" not in report.to_dict()["run"]


def test_the_page_says_why_groups_have_no_curve() -> None:
    text = page(grouped(WINDOW, FULL))
    assert "<h2>Hit ratio by cache size</h2>" not in text
    assert text.count("No hit ratio by cache size: ") == 1
    plain = page(understudy.replay(LOAD, VllmConfig(num_gpu_blocks=600, block_size=16)))
    assert "<h2>Hit ratio by cache size</h2>" in plain
    assert "No hit ratio by cache size" not in plain

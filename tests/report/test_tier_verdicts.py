"""Verdicts on tiers and KV cache groups, each rule both ways."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

import understudy
from replay.building import conversations, crowd
from report.tier_building import tiered
from report.verdict_building import DONE, found, report
from understudy.engines.vllm_config import VllmConfig
from understudy.report import Report, group_verdicts, tier_verdicts
from understudy.report.html import page
from understudy.tiers import TiersConfig
from understudy.workload import Normal, Poisson

if TYPE_CHECKING:
    from understudy.report.tiers import TierUse
    from understudy.report.verdict import Verdict


TIERS = {"kv_bytes_per_token": 1 << 20, "tiers": [{"tier": "g2", "blocks": 400, "link": {"down_gbps": 0.2}}]}


def test_a_tier_that_hurts_is_named() -> None:
    engine = VllmConfig(block_size=16, num_gpu_blocks=60)
    slow = TiersConfig.from_dict({**TIERS, "offload": {"mode": "evict"}})
    bad = understudy.replay(crowd(80), engine, tiers=slow, compare_without_tiers=True)
    said = found(tier_verdicts.tier_hurts(bad))
    assert "TTFT is +" in said
    assert "write_through" in said
    alone = found(tier_verdicts.tier_hurts(replace(bad, without_tiers=None)))
    assert "for blocks that were being offloaded" in alone
    fast = TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 16,
            "tiers": [{"tier": "g2", "blocks": 400}],
            "offload": {"mode": "write_through"},
        }
    )
    assert (
        tier_verdicts.tier_hurts(understudy.replay(crowd(80), engine, tiers=fast, compare_without_tiers=True))
        is None
    )
    assert tier_verdicts.tier_hurts(report(DONE)) is None


def test_a_link_without_room_to_spare_is_named() -> None:
    full = Report.build(tiered())
    assert full.tiers is not None
    quiet = replace(
        full.tiers, links=tuple(replace(link, window_utilisation=[0.5] * 10) for link in full.tiers.links)
    )
    busy = replace(
        full.tiers,
        links=tuple(
            replace(link, window_utilisation=[1.0] * 3 + [0.1] * 7, bandwidth_gbps=14.0)
            for link in full.tiers.links
        ),
    )
    assert tier_verdicts.link_at_its_limit(replace(full, tiers=quiet)) is None
    assert "at its limit of 14 GB/s for 30.0 % of the time" in found(
        tier_verdicts.link_at_its_limit(replace(full, tiers=busy))
    )
    assert tier_verdicts.link_at_its_limit(report(DONE)) is None


def test_a_window_whose_tail_is_gone_is_named_with_what_full_attention_had() -> None:
    window = understudy.KvCacheGroup(kind="sliding_window", block_size=16, window=64)
    full = understudy.KvCacheGroup(kind="full", block_size=16)
    load = conversations(30, output_tokens=Normal(mean=150, std=10))
    sparse = understudy.replay(load, VllmConfig(kv_cache_groups=(window, full), num_gpu_blocks=4000))
    dense = understudy.replay(
        load,
        VllmConfig(kv_cache_groups=(window, full), num_gpu_blocks=4000, prefix_cache_retention_interval=None),
    )
    assert "full attention alone had" in found(group_verdicts.group_tail_gone(sparse))
    assert group_verdicts.group_tail_gone(dense) is None
    facts = sparse.run.kv_groups
    assert facts is not None
    assert facts.hit_ratio == pytest.approx(sparse.prefix_hit_ratio.total)
    assert [group.kind for group in facts.groups] == ["sliding_window", "full_attention"]
    assert facts.groups[0].held_blocks_peak <= facts.groups[1].held_blocks_peak
    assert '<section class="card full"><div class="head"><h2>KV cache groups</h2>' in page(sparse)
    assert sparse.to_dict()["run"]["kv_groups"]["shortened_ratio"] > 0
    below, restored = (
        understudy.replay(
            load,
            VllmConfig(
                kv_cache_groups=(window, full), num_gpu_blocks=600, prefix_cache_retention_interval=None
            ),
            tiers=TiersConfig.from_dict(
                {
                    "tiers": [{"tier": "g2", "blocks": blocks}],
                    "kv_bytes_per_token": 1024,
                    "offload": {"mode": "vllm"},
                }
            ),
        )
        for blocks in (100, 400)
    )
    assert group_verdicts.group_tail_gone(restored) is None
    verdict = group_verdicts.group_tail_gone(below)
    assert "of the prompt tokens hit, and" in found(verdict)  # on any tier
    assert "hit, and" in found(group_verdicts.group_tail_gone(sparse))
    assert verdict is not None
    assert verdict.remedy == "More blocks may help."


def test_a_tier_that_no_request_reads_from_is_named() -> None:
    host = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 500}], "model": "Llama-3.1-8B"})
    calm = crowd(60, arrivals=Poisson(qps=5))
    unread = understudy.replay(calm, VllmConfig(num_gpu_blocks=4000), tiers=host)
    said = found(tier_verdicts.tier_never_read(unread))
    assert "No request read from g2" in said
    assert "none was loaded back" in said
    assert tier_verdicts.tier_never_read(understudy.replay(calm, VllmConfig(num_gpu_blocks=4000))) is None
    # A tier that is not read is named next to one that is.
    assert unread.tiers is not None
    g1, g2 = unread.tiers.tiers
    g3 = replace(g2, tier="g3", stored_blocks=580_853)
    g2 = replace(g2, hit_tokens_total=64)

    def judge(*tiers: TierUse) -> Verdict | None:
        assert unread.tiers is not None
        return tier_verdicts.tier_never_read(replace(unread, tiers=replace(unread.tiers, tiers=(g1, *tiers))))

    said = found(judge(g2, g3))
    assert said.startswith(
        "No request read from g3: 580,853 blocks were stored, and none was loaded back. Leave"
    )
    assert judge(g2, replace(g3, stored_blocks=0)) is None
    said = found(judge(replace(g2, hit_tokens_total=0), replace(g3, hit_tokens_total=64)))
    assert said.startswith("No request read from g2: ")
    assert "Leave" not in said

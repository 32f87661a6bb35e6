"""Reports of engines with several KV cache groups: bounds, verdicts, card and remedies."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import understudy
from replay.building import conversations
from understudy.engines.vllm_config import VllmConfig
from understudy.report.advise import advise
from understudy.report.group_verdicts import group_tail_gone
from understudy.report.html import page
from understudy.report.html.group_chart import group_card
from understudy.report.remedies import Change, Setup
from understudy.report.verdicts import cache_too_small
from understudy.run.group_facts import GroupFacts, GroupUse
from understudy.tiers.settings import TiersConfig
from understudy.workload import Normal, OpenLoop

if TYPE_CHECKING:
    from understudy.report import Report

WINDOW = understudy.KvCacheGroup(kind="sliding_window", block_size=16, window=64)
FULL = understudy.KvCacheGroup(kind="full", block_size=16)
LOAD = conversations(30, output_tokens=Normal(mean=150, std=10))


@cache
def grouped(*groups: understudy.KvCacheGroup, blocks: int = 600, workers: int = 1) -> Report:
    engine = VllmConfig(kv_cache_groups=groups, num_gpu_blocks=blocks)
    return understudy.replay(LOAD, engine, workers=workers)


def test_groups_are_bounded_by_unlimited_caches_of_full_attention() -> None:
    report = grouped(WINDOW, FULL, workers=2)
    assert report.kv.evictions
    assert report.run.kv_groups is not None
    full = report.run.kv_groups.full_attention_hit_ratio
    assert full is not None
    assert report.unlimited_hit_ratio is not None
    assert report.routed_hit_ratio is not None
    assert full < report.routed_hit_ratio < report.unlimited_hit_ratio
    assert report.hit_curve is None
    assert report.to_dict()["run"]["unlimited_hit_ratio"] == report.unlimited_hit_ratio
    one = understudy.replay(LOAD, VllmConfig(num_gpu_blocks=100_000, block_size=16))
    assert abs(one.prefix_hit_ratio.first_admission - report.unlimited_hit_ratio) < 0.01


def test_too_few_blocks_of_groups_are_found_by_the_hits_of_full_attention() -> None:
    (verdict,) = (one for one in grouped(WINDOW, FULL).verdicts if one.rule == "cache_too_small")
    assert re.search(r"\d % of the prompt tokens hit in full attention alone, an unlimited ", verdict.finding)
    report = grouped(WINDOW, FULL)
    facts = report.run.kv_groups
    assert facts is not None
    for full in (report.unlimited_hit_ratio, None):
        known = msgspec.structs.replace(facts, full_attention_hit_ratio=full)
        assert cache_too_small(replace(report, run=replace(report.run, kv_groups=known))) is None


def test_the_page_says_why_groups_have_no_curve() -> None:
    text = page(grouped(WINDOW, FULL))
    assert "<h2>Hit ratio by cache size</h2>" not in text
    assert text.count("No hit ratio by cache size: ") == 1
    plain = page(understudy.replay(LOAD, VllmConfig(num_gpu_blocks=600, block_size=16)))
    assert "<h2>Hit ratio by cache size</h2>" in plain
    assert "No hit ratio by cache size" not in plain


@pytest.mark.parametrize(
    ("full", "is_found"), [(0.9, True), (0.349, False), (None, False), (float("nan"), False)]
)
def test_a_lost_tail_is_5_points_below_full_attention_if_there_is_any(
    full: float | None, is_found: bool
) -> None:
    report = grouped(WINDOW, FULL)
    facts = report.run.kv_groups
    assert facts is not None
    known = msgspec.structs.replace(facts, hit_ratio=0.3, full_attention_hit_ratio=full)
    verdict = group_tail_gone(replace(report, run=replace(report.run, kv_groups=known)))
    assert (verdict is not None) == is_found


def test_host_memory_is_replayed_for_a_lost_tail() -> None:
    below = {"tiers": [{"tier": "g2", "blocks": 4000}], "kv_bytes_per_token": 1024}
    host = Change("--g2-bytes 64MiB", {"tiers": TiersConfig.from_dict(below)})
    report = grouped(WINDOW, FULL)
    engine = VllmConfig(kv_cache_groups=(WINDOW, FULL), num_gpu_blocks=600)
    setup = Setup(1, "round_robin", OpenLoop(), engine, can_add_blocks=False, has_sessions=True, host=host)

    def replay_with(changes: dict[str, Any]) -> Report:
        tiers = changes.pop("tiers", None)
        return understudy.replay(LOAD, msgspec.structs.replace(engine, **changes), tiers=tiers)

    (verdict,) = (one for one in advise(report, setup, replay_with).verdicts if one.rule == "group_tail_gone")
    assert re.search(r"--g2-bytes 64MiB: prefix hits \d\d\.\d % → \d\d\.\d % \(replayed\)", verdict.remedy)


def legend_of(report: Report) -> list[str]:
    card = group_card(report)
    assert card is not None
    return [name for _, name in card.legend]


def test_equal_groups_are_one_line_of_the_card_and_kinds_have_words() -> None:
    wide = understudy.KvCacheGroup(kind="sliding_window", block_size=16, window=2048)
    state = understudy.KvCacheGroup(kind="mamba", block_size=16)
    assert legend_of(grouped(wide, wide, wide, FULL)) == ["0-2: window 2,048 (each)", "3: full attention"]
    assert legend_of(grouped(state, FULL, state)) == ["0, 2: state (each)", "1: full attention"]
    card = group_card(grouped(WINDOW, WINDOW, FULL))
    assert card is not None
    assert card.figure.count('class="line') == 2
    assert len(card.legend) == len({style for style, _ in card.legend})


def test_the_card_states_its_unit_and_the_pool() -> None:
    card = group_card(grouped(WINDOW, FULL, blocks=2000, workers=2))
    assert card is not None
    assert card.subtitle.startswith("blocks held by running requests, all workers; pool 2 × 2,000 blocks; ")
    assert re.search(r"; \d+\.\d % of tokens hit, full attention alone \d+\.\d %$", card.subtitle)


def test_the_card_leaves_out_full_attention_where_no_group_has_it() -> None:
    report = grouped(WINDOW, FULL)
    known = report.run.kv_groups
    assert known is not None
    facts = msgspec.structs.replace(known, full_attention_hit_ratio=None)
    card = group_card(replace(report, run=replace(report.run, kv_groups=facts)))
    assert card is not None
    assert card.subtitle.endswith("of tokens hit")


def test_every_number_of_groups_is_defined_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    section = text.partition("## KV cache groups\n")[2].partition("\n## ")[0]
    uses = {f"groups[].{name}" for name in GroupUse.__struct_fields__}
    facts = set(GroupFacts.__struct_fields__) - {"groups"}
    assert {key.removesuffix("[]") for key in re.findall(r"^\| `([^`]+)` \|", section, re.M)} == uses | facts

"""Curves of a run and its report have one bound, for engines with rules of their own for last blocks too."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import understudy
from answers.session_traces import BLOCK, Row, write_rows
from understudy import VllmConfig, read_trace
from understudy.cache.curves import CacheCurves
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Constant
from understudy.run.admissions import LastTokens
from understudy.tiers import TiersConfig

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.engines.engine_config import EngineConfig

TIMES = Constant(5.0, 2.0)
OFFLOAD = {
    "tiers": [{"tier": "g2", "blocks": 300}],
    "offload": {"mode": "vllm"},
    "kv_bytes_per_token": 131072,
}
ENGINES: dict[str, tuple[EngineConfig, TiersConfig | None]] = {
    "vllm": (VllmConfig(block_size=BLOCK, num_gpu_blocks=20, timing=TIMES), None),
    "vllm with its offload": (
        VllmConfig(block_size=BLOCK, num_gpu_blocks=20, timing=TIMES),
        TiersConfig.from_dict(OFFLOAD),
    ),
    "sglang, overlapped": (SglangConfig(block_size=BLOCK, num_gpu_blocks=20, timing=TIMES), None),
    "sglang, one by one": (
        SglangConfig(block_size=BLOCK, num_gpu_blocks=20, timing=TIMES, disable_overlap_schedule=True),
        None,
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bounds")


def rows_with_full_blocks(draw: Random) -> list[Row]:
    """Sessions of two turns whose prompts and answers fill their last blocks, some with equal first turns."""
    rows: list[Row] = []
    for number in range(12):
        prompt, answer = draw.randint(1, 4), draw.randint(1, 2)
        ids = [draw.choice([0, number]) * 50 + place for place in range(prompt + answer + 1)]
        whole = (prompt + answer) * BLOCK
        first: Row = {"timestamp": 100 * number, "input_length": prompt * BLOCK, "hash_ids": ids[:prompt]}
        first |= {"output_length": whole - prompt * BLOCK, "max_tokens": 64}  # ends by itself
        later: Row = {"delay": 100, "input_length": whole + BLOCK, "output_length": 3, "hash_ids": ids}
        for turn, row in enumerate((first, later)):
            rows.append(row | {"session_id": f"s{number}", "output_in_next_turn": turn == 0, "turn": turn})
    return rows


def bounds(name: str, seed: int, workers: int, folder: Path) -> list[tuple[float | None, ...]]:
    """Bounds of the report, of its curves, and of curves by the plain rules; empty without evictions."""
    engine, tiers = ENGINES[name]
    path = write_rows(rows_with_full_blocks(Random(seed)), folder / "rows.jsonl")
    workload = read_trace(path, trace_block_size=BLOCK)
    report = understudy.replay(workload, engine, workers=workers, tiers=tiers)
    if not report.kv.evictions:
        return []
    found: list[tuple[float | None, ...]] = [(report.unlimited_hit_ratio, report.routed_hit_ratio)]
    for last in (LastTokens.of(report.run), LastTokens()):
        curves = CacheCurves(workload, BLOCK, run=report.columns, last=last)
        found.append((curves.unlimited_hit_ratio, curves.routed_hit_ratio if workers > 1 else None))
    return found


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10**6), workers=st.integers(1, 2))
def test_curves_and_reports_have_one_bound(name: str, seed: int, workers: int, folder: Path) -> None:
    if found := bounds(name, seed, workers, folder):
        said, ours, _ = found
        assert ours == said


@pytest.mark.parametrize("name", ["vllm with its offload", "sglang, overlapped"])
def test_rules_of_last_blocks_change_these_bounds(name: str, folder: Path) -> None:
    said, _, plain = bounds(name, 1, 1, folder)
    assert said[0] is not None
    assert plain[0] is not None
    assert said[0] > plain[0]

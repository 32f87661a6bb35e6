"""The tables of docs/replay.md, "Defaults", compared with what a replay and the Python API use."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import understudy as us
from understudy.run.settings import ReplaySettings
from understudy.timing.gpus import GPUS

PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
SECTION = PAGE.split("### Defaults")[1].split("\n### ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line[:1] == "|"
]


def number(text: str) -> int:
    return int(re.split(r"[^\d,]", text)[0].replace(",", ""))


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_the_page_says_the_limits_of_every_gpu(gpu: str) -> None:
    [row] = [row for row in ROWS if re.search(rf"\b{gpu}\b", row[0])]
    engine = ReplaySettings.read(
        None, {"model": "Llama-3.1-8B", "gpu": {"name": gpu}, "engine": {"num_gpu_blocks": 100}}, []
    ).engine
    assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (number(row[1]), number(row[2]))
    assert engine.block_size == 16


def test_the_page_says_the_limits_without_a_gpu() -> None:
    [row] = [row for row in ROWS if row[0].startswith("not given")]
    for engine in (us.VllmConfig(), ReplaySettings.read(None, {}, []).engine):
        assert (engine.max_num_batched_tokens, engine.max_num_seqs) == (number(row[1]), number(row[2]))
        said = {row[0]: row[1] for row in ROWS}
        assert engine.block_size == number(said["`block_size`"])
        assert engine.num_gpu_blocks == number(said["`num_gpu_blocks`"])


def test_the_page_says_the_share_of_memory() -> None:
    [row] = [row for row in ROWS if row[0] == "`gpu_memory_utilization`"]
    newest, earlier = row[1].split("; before vLLM 0.20, ")
    assert us.VllmConfig().memory_share == float(newest)
    assert us.VllmConfig(vllm_version="0.20").memory_share == float(newest)
    assert us.VllmConfig(vllm_version="0.19").memory_share == float(earlier)

"""The digest of a run changes only when the run does: fields that it does not use must not be part of it."""

from __future__ import annotations

from pathlib import Path

from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.workload.mooncake import read_mooncake

DEMO = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"


def test_the_digest_of_a_plain_run_stays() -> None:
    engine = VllmConfig(block_size=64, max_num_batched_tokens=8192)
    assert run_offline(RunPlan(read_mooncake(DEMO), engine, workers=2)).facts.digest == "d8d73b82594b30d1"


def test_the_digest_of_a_run_with_every_default_stays() -> None:
    assert run_offline(RunPlan(read_mooncake(DEMO), workers=2)).facts.digest == "61f0b57ed62c4cde"

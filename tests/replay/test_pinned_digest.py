"""The digest of a run changes only when the run does: fields that it does not use must not be part of it."""

from __future__ import annotations

from pathlib import Path

from understudy.run.offline import run_offline
from understudy.workload.mooncake import read_mooncake

DEMO = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"


def test_the_digest_of_a_plain_run_stays() -> None:
    assert run_offline(read_mooncake(DEMO), workers=2).facts.digest == "1ccab9e5087a55c0"

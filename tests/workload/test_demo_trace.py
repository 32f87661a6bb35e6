from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy.workload import read_trace, write_mooncake

if TYPE_CHECKING:
    from understudy.workload import Workload

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def demo() -> Workload:
    script: dict[str, Any] = runpy.run_path(str(EXAMPLES / "make_demo_trace.py"))
    made: Workload = script["demo_workload"]()
    return made


def test_the_committed_demo_trace_is_what_its_script_makes(demo: Workload, tmp_path: Path) -> None:
    write_mooncake(demo, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (EXAMPLES / "demo_trace.jsonl").read_bytes()


def test_the_demo_trace_is_small_and_rich_in_shared_prefixes(demo: Workload) -> None:
    w = read_trace(EXAMPLES / "demo_trace.jsonl")
    assert len(w) == len(demo)
    assert (EXAMPLES / "demo_trace.jsonl").stat().st_size < 300_000
    assert len(set(w.hash_ids.tolist())) < len(w.hash_ids) / 4
    assert w.sessions < len(w) / 2

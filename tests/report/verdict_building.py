"""Reports of a few rows, for the tests of verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from report.building import Row, timeline
from understudy.report import Report, Slo

if TYPE_CHECKING:
    from understudy.report.verdict import Verdict
    from understudy.run.facts import RunFacts

DONE = Row([10, 20])
DEMO = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
LARGE = ("--block-size", "64", "--max-num-batched-tokens", "8192")


def report(*rows: Row, run: RunFacts | None = None, slo: Slo | None = None, **overrides: Any) -> Report:
    """Build the report of these rows; `overrides` replace columns of its timeline."""
    return Report.build(timeline(*rows, **overrides), run, slo)


def found(verdict: Verdict | None) -> str:
    """Return the text of a verdict that must be there."""
    assert verdict is not None
    return str(verdict)

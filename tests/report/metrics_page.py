"""Writes the tables of docs/metrics.md from the definitions: `python tests/report/metrics_page.py`."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from understudy._core import TierTotals
from understudy.report.fault_metrics import FAULT_METRICS
from understudy.report.fleet_metrics import FLEET_METRICS
from understudy.report.handoff_metrics import HANDOFF_METRICS
from understudy.report.metrics import DISTRIBUTIONS, SCALARS
from understudy.report.statistics import PERCENTILE_METHOD
from understudy.report.tier_metrics import TIER_DISTRIBUTIONS, TIER_ROWS, TIER_SCALARS
from understudy.report.worst_hour import WORST_HOUR_METRICS
from understudy.run.digest import OF_LINK, OF_TIER, OF_VLLM_OFFLOAD
from understudy.run.handoff_columns import HandOffColumns
from understudy.run.losses import RequestLosses
from understudy.run.schema import list_columns, list_totals
from understudy.run.tier_columns import TierColumns
from understudy.run.timeline import Timeline
from understudy.run.worker_lives import WorkerLives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.report.metric import Metric

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ALL_COLUMNS = (
    *(*list_columns(Timeline), *list_columns(TierColumns)),
    *(*list_columns(HandOffColumns), *list_columns(WorkerLives), *list_columns(RequestLosses)),
)


def table(metrics: tuple[Metric, ...]) -> str:
    """One row a metric."""
    rows = [f"| `{m.key}` | {m.name} | {m.unit} | {m.definition} |" for m in metrics]
    return "\n".join(["| key | metric | unit | definition |", "|---|---|---|---|", *rows])


def columns() -> str:
    """One row a column of the record; those of runs with tiers, roles and changing fleets last."""
    declared = ALL_COLUMNS
    rows = [f"| `{c.name}` | {c.about.per} | {c.about.unit} | {c.about.doc} |" for c in declared]
    return "\n".join(["| column | one per | unit | meaning |", "|---|---|---|---|", *rows])


LEFT_OUT = {
    "queued_ns": "it came later, and runs keep the digests that they had",
    "offered_ns": "likewise",
    "request_ids": "the workload's own names of its requests",
    "reject_reasons": "the wording; which were rejected, `status` says",
    "own_blocks": "KV blocks of each worker where pools differ, a setting; `blocks_per_worker`, the most of one, is",
}
"""Fields of a timeline that its digest does not cover, and why."""


def quoted(names: Sequence[str]) -> str:
    """Names of code, in a row."""
    return ", ".join(f"`{name}`" for name in names)


def left_out() -> list[str]:
    """The names of these, by the schema."""
    columns = ALL_COLUMNS
    covered = {c.name for c in columns if c.about.digested} | {
        *list_totals(Timeline),
        "tiers",
        "handoff",
        "lives",
        "losses",
    }
    parts = (*list_columns(TierColumns), *list_columns(HandOffColumns))
    undigested = [column.name for column in parts if not column.about.digested]
    return [each.name for each in fields(Timeline) if each.name not in covered] + undigested


def digest() -> str:
    """What the digest covers, and what not."""
    bare = quoted([c.name for c in ALL_COLUMNS if not c.about.digested])
    totals = [name for name in dir(TierTotals) if not name.startswith("_") and name not in OF_VLLM_OFFLOAD]
    lines = [
        f"- every column above, but for {bare};",
        f"- the run's numbers: {quoted(list_totals(Timeline))};",
        f"- with tiers, their totals: {quoted(totals)}, and {quoted(OF_VLLM_OFFLOAD)} where they are not 0;",
        f"- of each tier its name, {quoted(OF_TIER)} and its residency over time;",
        f"- of each link its name, `bandwidth_gbps`, {quoted(OF_LINK)} and `bucket_bytes`.",
        "",
        "Not covered, so that runs which differ in it alone have equal digests:",
        "",
        *(f"- `{name}`: {LEFT_OUT[name]}" for name in left_out()),
    ]
    return "\n".join(lines)


PARTS = {
    "columns": columns(),
    "digest": digest(),
    "distributions": table(DISTRIBUTIONS),
    "numbers": table(SCALARS + WORST_HOUR_METRICS + FLEET_METRICS + FAULT_METRICS),
    "tiers": table(TIER_DISTRIBUTIONS + TIER_SCALARS + TIER_ROWS),
    "hand-offs": table(HANDOFF_METRICS),
    "percentiles": f"Percentiles: {PERCENTILE_METHOD}.",
}


def written(text: str) -> str:
    """Return `text` with every marked part replaced by what the definitions say."""
    for name, part in PARTS.items():
        begin, end = (
            f"<!-- {name}: written by tests/report/metrics_page.py -->\n",
            f"\n<!-- end of {name} -->",
        )
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        text, found = pattern.subn(lambda _, new=begin + part + end: new, text)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"docs/metrics.md has {found} parts marked {name!r}, not one")
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

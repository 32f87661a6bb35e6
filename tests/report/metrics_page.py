"""Writes the tables of docs/metrics.md from the definitions: `python tests/report/metrics_page.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from understudy.report.metrics import DISTRIBUTIONS, SCALARS
from understudy.report.statistics import PERCENTILE_METHOD
from understudy.report.tier_metrics import TIER_DISTRIBUTIONS, TIER_ROWS, TIER_SCALARS
from understudy.run.schema import columns_of
from understudy.run.tier_columns import TierColumns
from understudy.run.timeline import Timeline

if TYPE_CHECKING:
    from understudy.report.metric import Metric

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def table(metrics: tuple[Metric, ...]) -> str:
    """One row a metric."""
    rows = [f"| `{m.key}` | {m.name} | {m.unit} | {m.definition} |" for m in metrics]
    return "\n".join(["| key | metric | unit | definition |", "|---|---|---|---|", *rows])


def columns() -> str:
    """One row a column of the record; those of runs with tiers last."""
    declared = (*columns_of(Timeline), *columns_of(TierColumns))
    rows = [f"| `{c.name}` | {c.about.per} | {c.about.unit} | {c.about.doc} |" for c in declared]
    return "\n".join(["| column | one per | unit | meaning |", "|---|---|---|---|", *rows])


PARTS = {
    "columns": columns(),
    "distributions": table(DISTRIBUTIONS),
    "numbers": table(SCALARS),
    "tiers": table(TIER_DISTRIBUTIONS + TIER_SCALARS + TIER_ROWS),
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

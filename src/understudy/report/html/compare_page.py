"""Build the page of a comparison: verdicts, metrics with their changes, and differing settings."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from understudy.report.html.charts import render_card
from understudy.report.html.compare_cdfs import compare_cdfs
from understudy.report.html.frame import THEME_BUTTON, build_document, prose
from understudy.report.html.tiles import change, points
from understudy.text import quantity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from understudy.report.comparison import ComparedReports

_LOWER_IS_BETTER = (
    "ttft_ms",
    "itl_ms",
    "e2e_ms",
    "queue_ms",
    "preemptions",
    "kv.evictions",
    "requests.rejected",
)
_HIGHER_IS_BETTER = ("throughput", "goodput", "prefix_hit_ratio", "requests.completed")
_STYLE = """
td.wrap { white-space: normal; min-width: 130px; vertical-align: top; }
.conclusion { font-size: 17px; font-weight: 600; margin: 0 0 14px; overflow-wrap: anywhere; }
"""


def compare_page(comparison: ComparedReports, settings: list[tuple[str, list[str]]]) -> str:
    """Build the page; `settings` are the formatted settings that differ."""
    title = escape(" · ".join(comparison.names))
    verdicts = "".join(
        f"<li>{escape(', '.join(names))}: <strong>{prose(finding)}</strong> {prose(remedy)}</li>"
        for names, finding, remedy in comparison.verdicts()
    )
    verdicts += "".join(f'<li class="note">{prose(note)}</li>' for note in comparison.notes())
    times = "".join(f"<span>{escape(line)}</span>" for line in comparison.times())
    differed = [
        f"<tr><td>{escape(name)}</td>{_cells(map(escape, values), 'wrap')}</tr>" for name, values in settings
    ]
    same = ['<tr><td class="text">the runs have the same configuration</td></tr>']
    reference = f"changes relative to {escape(comparison.names[0])}"
    body = [
        f'<header><div><h1>{title}</h1><div class="facts">{times}</div></div>{THEME_BUTTON}</header>',
        f'<p class="conclusion">{prose(comparison.conclusion())}</p>',
        f'<ul class="verdicts">{verdicts}</ul>' if verdicts else "",
        '<div class="cards">',
        *(render_card(card) for card in compare_cdfs(comparison.names, comparison.reports)),
        _table(comparison, "Metrics", reference, "Metric", _metrics(comparison)),
        _table(comparison, "Configuration", "settings that differ", "Setting", differed or same),
        "</div>",
    ]
    return build_document(" · ".join(comparison.names), body, style=_STYLE)


def _table(comparison: ComparedReports, title: str, about: str, first: str, rows: list[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in comparison.names)
    return (
        f'<section class="card full"><div class="head"><h2>{title}</h2><span class="sub">{about}</span></div>'
        f'<div class="scroll"><table><thead><tr><th>{first}</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _metrics(comparison: ComparedReports) -> list[str]:
    rows = []
    for path, label, unit, values in comparison.rows():
        better = -1 if path.startswith(_LOWER_IS_BETTER) else 1 if path.startswith(_HIGHER_IS_BETTER) else 0
        compare = points if unit == "ratio" else change
        cells = [quantity(values[0], unit)]
        cells += [f"{quantity(value, unit)}{compare(value, values[0], better)}" for value in values[1:]]
        shown = "" if unit == "ratio" else f' <span class="unit">{escape(unit)}</span>'
        rows.append(f"<tr><td>{escape(label)}{shown}</td>{_cells(cells)}</tr>")
    return rows


def _cells(texts: Iterable[str], style: str = "") -> str:
    attribute = f' class="{style}"' if style else ""
    return "".join(f"<td{attribute}>{text}</td>" for text in texts)

"""The page of a comparison: verdicts, every number beside the first report's, and what differed."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from understudy.report.html.frame import THEME_BUTTON, framed
from understudy.report.html.tiles import change, points
from understudy.report.text import quantity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from understudy.report.compare import Comparison

_LESS = ("ttft_ms", "itl_ms", "e2e_ms", "queue_ms", "preemptions", "kv.evictions", "requests.rejected")
_MORE = ("throughput", "goodput", "prefix_hit_ratio", "requests.completed")
_WRAPPED = "td.wrap { white-space: normal; min-width: 130px; vertical-align: top; }"


def compare_page(comparison: Comparison, settings: list[tuple[str, list[str]]]) -> str:
    """The page as text; `settings` are those that differed, in words."""
    title = escape(" · ".join(comparison.names))
    verdicts = "".join(
        f"<li>{escape(name)}: <strong>{escape(one['finding'])}</strong> {escape(one['remedy'])}</li>"
        for name, report in zip(comparison.names, comparison.reports, strict=True)
        for one in report.get("verdicts", ())
    )
    times = "".join(f"<span>{escape(line)}</span>" for line in comparison.times())
    differed = [
        f"<tr><td>{escape(name)}</td>{_cells(map(escape, values), 'wrap')}</tr>" for name, values in settings
    ]
    same = ['<tr><td class="text">the runs have the same configuration</td></tr>']
    beside = f"changes against {escape(comparison.names[0])}"
    body = [
        f'<header><div><h1>{title}</h1><div class="facts">{times}</div></div>{THEME_BUTTON}</header>',
        f'<ul class="verdicts">{verdicts}</ul>' if verdicts else "",
        '<div class="cards">',
        _table(comparison, "What came of it", beside, "Metric", _metrics(comparison)),
        _table(comparison, "What differed", "in the configuration", "Setting", differed or same),
        "</div>",
    ]
    return framed(" · ".join(comparison.names), body, style=_WRAPPED)


def _table(comparison: Comparison, title: str, about: str, first: str, rows: list[str]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in comparison.names)
    return (
        f'<section class="card full"><div class="head"><h2>{title}</h2><span class="sub">{about}</span></div>'
        f'<div class="scroll"><table><thead><tr><th>{first}</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _metrics(comparison: Comparison) -> list[str]:
    rows = []
    for path, label, unit, values in comparison.rows():
        better = -1 if path.startswith(_LESS) else 1 if path.startswith(_MORE) else 0
        compare = points if unit == "ratio" else change
        cells = [quantity(values[0], unit)]
        cells += [f"{quantity(value, unit)}{compare(value, values[0], better)}" for value in values[1:]]
        shown = "" if unit == "ratio" else f' <span class="unit">{escape(unit)}</span>'
        rows.append(f"<tr><td>{escape(label)}{shown}</td>{_cells(cells)}</tr>")
    return rows


def _cells(texts: Iterable[str], style: str = "") -> str:
    attribute = f' class="{style}"' if style else ""
    return "".join(f"<td{attribute}>{text}</td>" for text in texts)

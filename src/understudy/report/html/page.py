"""Build the report's page: header, tiles, plots, tables."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.report.engine_terms import terms_of
from understudy.report.html import charts
from understudy.report.html.balance import worker_balance
from understudy.report.html.frame import THEME_BUTTON, build_document, prose
from understudy.report.html.goal import goal_line
from understudy.report.html.group_chart import group_card
from understudy.report.html.handoff_charts import handoff_cards, handoff_tables
from understudy.report.html.heat_map import usage_by_worker
from understudy.report.html.hit_curve import hits_by_cache_size
from understudy.report.html.phase_chart import latency_by_phase, phases_over_time
from understudy.report.html.routing import routing_card, routing_table
from understudy.report.html.tier_charts import tier_cards
from understudy.report.html.tier_tables import tier_tables
from understudy.report.html.tiles import change, tiles
from understudy.report.html.waterfall_chart import slowest_by_part
from understudy.report.latency import NS_PER_S
from understudy.report.metrics import DISTRIBUTIONS, SCALARS, STATISTICS
from understudy.report.no_verdict import describe_no_verdict
from understudy.report.statistics import PERCENTILE_METHOD
from understudy.report.table import describe_size
from understudy.run.schema import NEVER
from understudy.run.timeline import Status
from understudy.run.times import format_lateness, format_times
from understudy.text import duration, fixed, plural, quantity, significant

if TYPE_CHECKING:
    from understudy.report.html.charts import Card
    from understudy.report.judged import JudgedReport
    from understudy.report.metric import Metric

MAX_PROBLEMS = 50
SHOWN_IN_HEADER = ("workload", "wall_time_s", "digest")
_TAIL_FIRST = {
    name: STATISTICS[name] for name in sorted(STATISTICS, key=lambda name: not name.startswith("p"))
}
"""Statistics of the table, percentiles first: narrow screens show the first columns."""
_NO_BOUND = (
    "No hit ratio by cache size: such a curve is that of one group of full attention, and windows and states hit "
    "otherwise; replay other sizes (--num-gpu-blocks)."
)


def page(report: JudgedReport, baseline: JudgedReport | None = None) -> str:
    """Return the whole page as text; equal reports give equal text."""
    title = report.run.workload or "Replay"
    body = [
        _header(report, title, baseline),
        goal_line(report),
        _verdicts(report),
        tiles(report, baseline),
        '<div class="cards">',
        *(charts.render_card(card) for card in _cards(report, baseline)),
        _distributions(report, baseline),
        _scalars(report),
        routing_table(report),
        handoff_tables(report),
        tier_tables(report),
        _problems(report),
        _run(report),
        "</div>",
    ]
    footer = (
        f"Percentiles are exact ({escape(PERCENTILE_METHOD)}). Latencies are those of completed requests. "
    )
    return build_document(title, body, footer=footer)


def _header(report: JudgedReport, title: str, baseline: JudgedReport | None) -> str:
    timeline = report.columns
    workers = "1 worker" if timeline.num_workers == 1 else f"{timeline.num_workers:,} workers"
    facts = [
        f"<b>{workers}</b> × {timeline.blocks_per_worker:,} {terms_of(report).block}s of "
        f"{plural(timeline.block_size, 'token')}",
        f"<b>{duration(report.duration_s)}</b> simulated",
    ]
    run = report.run
    if (size := describe_size(report)) is not None:
        facts.insert(0, f"<b>{size.replace(' x ', ' × ')}</b>")
    if run.scheduling is not None:
        facts.insert(1, f"<b>{escape(run.scheduling)}</b> scheduling")
    if (wall_time_s := run.wall_time_s) is not None and wall_time_s > 0:
        speed = report.duration_s / wall_time_s
        facts.append(f"in <b>{duration(wall_time_s)}</b>, {significant(speed)} × real time")
    if report.steps:
        facts.append(f"<b>{report.steps:,}</b> steps")
    if run.users is not None:
        facts.append(f"<b>{run.users:g}</b> × the users of the trace")
    if run.lateness_ms:
        facts.append(f"lateness of the machine: {escape(format_lateness(run.lateness_ms))}")
    if (hour := report.worst_hour) is not None:
        facts.append(f"worst hour {escape(hour.describe(report.throughput.requests_per_s))}")
    if baseline is not None:
        facts.append(f"compared with <b>{escape(baseline.run.workload or 'a baseline')}</b>")
    if run.digest is not None:
        facts.append(f"digest <code>{escape(run.digest)}</code>")
    spans = "".join(f"<span>{fact}</span>" for fact in facts)
    source = f"times from {escape(format_times(run.times))}"
    if baseline is not None and (others := format_times(baseline.run.times)) != format_times(run.times):
        source += f"; the run beside it has its times from {escape(others)}"
    return (
        f'<header><div><h1>{escape(title)}</h1><div class="facts">{spans}</div>'
        f'<div class="source">{source}</div></div>{THEME_BUTTON}</header>'
    )


def _verdicts(report: JudgedReport) -> str:
    """Build the list of verdicts (or a sentence that there are none), then the notes, folded; empty without any."""
    items = [f"<li><b>{prose(v.finding)}</b> {prose(v.remedy)}</li>" for v in report.verdicts]
    if none := describe_no_verdict(report):
        items.append(f"<li>{prose(none)}</li>")
    if report.advice is not None:
        items.append(f'<li class="note">{prose(str(report.advice))}</li>')
    notes = (*report.run.notes, _NO_BOUND) if report.run.has_kv_groups else report.run.notes
    style = "verdicts" if report.verdicts else "verdicts none"
    said = f'<ul class="{style}">{"".join(items)}</ul>' if items else ""
    return said + _fold_notes([prose(note) for note in notes])


def _fold_notes(notes: list[str]) -> str:
    """Return the notes, of which only the number is visible until they are unfolded; empty without any."""
    if not notes:
        return ""
    listed = "".join(f"<li>{note}</li>" for note in notes)
    return (
        f'<details class="notes"><summary>{plural(len(notes), "note")}</summary><ul>{listed}</ul></details>'
    )


def _cards(report: JudgedReport, baseline: JudgedReport | None) -> list[Card]:
    balance = worker_balance(report)
    hits = charts.prefix_hits(report, baseline, "half" if balance is not None else "full")
    rest = [
        latency_by_phase(report, baseline),
        phases_over_time(report, baseline),
        slowest_by_part(report),
        charts.ttft_over_time(report, baseline),
        charts.running_waiting(report, baseline),
        charts.kv_usage(report, baseline),
        group_card(report),
        hits,
        balance,
        routing_card(report),
        usage_by_worker(report),
        hits_by_cache_size(report),
        *handoff_cards(report),
        *tier_cards(report, baseline),
    ]
    return charts.latency_cdfs(report, baseline) + [card for card in rest if card is not None]


def _named(metric: Metric) -> str:
    return f'<span data-tip="{escape(metric.definition)}" tabindex="0">{escape(metric.name)}</span>'


def _distributions(report: JudgedReport, baseline: JudgedReport | None) -> str:
    head = "".join(f"<th>{name}</th>" for name in _TAIL_FIRST)
    head += "<th>avg, change</th>" if baseline is not None else ""
    rows = []
    for metric in DISTRIBUTIONS:
        values = getattr(report, metric.key)
        cells = "".join(f"<td>{fixed(getattr(values, field))}</td>" for field in _TAIL_FIRST.values())
        if baseline is not None:
            cells += f"<td>{change(values.mean, getattr(baseline, metric.key).mean) or '–'}</td>"
        rows.append(f'<tr><td>{_named(metric)} <span class="unit">{metric.unit}</span></td>{cells}</tr>')
    return (
        '<section class="card full"><div class="head"><h2>Distributions</h2><span class="sub">completed '
        "requests; hover over a name for its definition</span></div>"
        f'<div class="scroll"><table><thead><tr><th>Metric</th>{head}</tr></thead><tbody>{"".join(rows)}'
        "</tbody></table></div></section>"
    )


def _scalars(report: JudgedReport) -> str:
    rows = []
    for metric in SCALARS:
        value: Any = report
        for name in metric.key.split("."):
            value = getattr(value, name, None)
        if value is not None:
            unit = "" if metric.unit == "ratio" else f' <span class="unit">{metric.unit}</span>'
            rows.append(f"<div>{_named(metric)}<span>{quantity(value, metric.unit)}{unit}</span></div>")
    return (
        '<section class="card full"><div class="head"><h2>Totals and rates</h2></div>'
        f'<div class="columns">{"".join(rows)}</div></section>'
    )


def _problems(report: JudgedReport) -> str:
    timeline = report.columns
    rows = np.flatnonzero(~timeline.completed)
    if not len(rows):
        return ""
    lines = []
    for row in rows[:MAX_PROBLEMS].tolist():
        arrival_ns = int(timeline.arrival_ns[row])
        arrival = "never" if arrival_ns == NEVER else duration((arrival_ns - timeline.start_ns) / NS_PER_S)
        lines.append(
            f"<tr><td>{row}</td><td>{timeline.session[row]}</td><td>{timeline.turn[row]}</td><td>{arrival}</td>"
            f"<td>{timeline.prompt_tokens[row]:,}</td>"
            f"<td>{timeline.output_tokens[row]:,} of {timeline.requested_output_tokens[row]:,}</td>"
            f'<td class="text">{Status(timeline.status[row]).name.lower()}</td>'
            f'<td class="text">{escape(timeline.reject_reasons.get(row, ""))}</td></tr>'
        )
    left_out = len(rows) - len(lines)
    note = f"the first {len(lines)} of {len(rows):,}" if left_out else f"{len(rows):,}"
    return (
        f'<section class="card full"><details open><summary><h2>Requests that did not complete</h2> '
        f'<span class="sub">{note}</span></summary><div class="scroll"><table><thead><tr><th>Request</th>'
        "<th>Session</th><th>Turn</th><th>Arrival</th><th>Prompt tokens</th><th>Output tokens</th>"
        '<th class="text">Status</th><th class="text">Reason</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></details></section>"
    )


def _run(report: JudgedReport) -> str:
    facts = _flatten(
        {name: value for name, value in report.run.to_dict().items() if name not in SHOWN_IN_HEADER}
    )
    if not facts:
        return ""
    rows = "".join(
        f"<div><span>{escape(name)}</span><span>{escape(value)}</span></div>" for name, value in facts
    )
    return (
        '<section class="card full"><details><summary><h2>Configuration</h2></summary>'
        f'<div class="columns">{rows}</div></details></section>'
    )


def _flatten(facts: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested facts to dotted names and texts."""
    flat = []
    for name, value in facts.items():
        if isinstance(value, dict):
            flat += _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, float) and math.isfinite(value):
            flat.append((prefix + name, f"{value:g}"))
        else:
            flat.append((prefix + name, "none" if value is None else str(value)))
    return flat

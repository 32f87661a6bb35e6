"""Plot and tabulate routing decisions: predicted and actual hits, and the costliest choices."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.engine_terms import terms_of
from understudy.report.html.charts import FULL, Card, middles, percent, time_axis, window_labels
from understudy.report.html.plot import HoverSeries, Plot
from understudy.report.html.scale import Scale
from understudy.report.latency import NS_PER_S
from understudy.report.series import window_of, windows
from understudy.router.choices import Choices
from understudy.text import duration, significant

if TYPE_CHECKING:
    from understudy.report.data import ReportData
    from understudy.report.statistics import Float64Column

MAX_ROWS = 12
_SUMMARY = {
    "predicted_hit": (
        "predicted hit",
        "Share of prompt tokens predicted to hit on the chosen workers.",
    ),
    "held_hit": (
        "cached at decision",
        "Share of prompt tokens cached on the chosen workers at the decision.",
    ),
    "actual_hit": ("actual hit", "Share of prompt tokens that hit when the engines admitted the requests."),
    "best_hit": ("best worker", "Largest share of prompt tokens cached on any one worker, per request."),
    "cache_regretted": (
        "not the best cache",
        "Share of decisions for which another worker had more of the prompt cached.",
    ),
    "regretted": ("regretted", "Share of decisions for which another worker had a lower true cost."),
    "tied": ("tied", "Share of decisions with several workers of equal cost; one was chosen at random."),
    "waited": ("waited", "Share of requests that waited in the router's queue."),
}
_REGRETS = {
    "mean_cost_regret_blocks": ("regret", "Mean true cost of a choice − true cost of the best worker."),
    "mean_cache_regret_blocks": (
        "cache regret",
        "Mean cached prompt {unit} of the best worker − those of the chosen one.",
    ),
}


def routing_card(report: ReportData) -> Card | None:
    """Plot predicted, actual and best possible hits by time of decision; None without decisions."""
    decisions = report.decisions
    if decisions is None or not len(decisions):
        return None
    timeline = report.columns
    tokens = timeline.prompt_tokens[decisions.rows].astype(np.float64)
    count = min(60, max(8, len(decisions) // 40))
    edges = windows(timeline, count)
    window = window_of(decisions.time_ns, edges)
    asked = np.bincount(window, tokens, count)

    def share(values: Float64Column) -> Float64Column:
        sums = np.bincount(window, values, count)
        out: Float64Column = np.divide(sums, asked, out=np.full(count, np.nan), where=asked > 0)
        return out

    size = timeline.block_size
    predicted = "cached at decision" if isinstance(decisions, Choices) else "predicted"
    blocks = decisions.true_overlap_blocks if isinstance(decisions, Choices) else decisions.overlap_blocks
    series = [
        (predicted, "s1", share(np.minimum(blocks * float(size), tokens))),
        ("actual", "s4", share(timeline.cached_tokens_first[decisions.rows].astype(np.float64))),
        (
            "best worker",
            "base",
            share(np.minimum(decisions.best_true_overlap_blocks * float(size), tokens)),
        ),
    ]
    x, seconds = time_axis(report, FULL)
    top = max(float(np.nanmax(values)) for _, _, values in series)
    plot = Plot(
        FULL,
        x,
        Scale.linear(min(1.0, max(top, 0.01)), FULL.y, label=percent),
        f"{predicted.capitalize()} and actual hits",
    )
    xs = middles(report, edges) / seconds
    hover = []
    for name, style, values in series:
        plot.line(xs, values, style)
        hover.append(HoverSeries(name, style, ["" if v != v else percent(v) for v in values.tolist()]))
    plot.on_hover(xs, window_labels(report, edges), hover)
    width = duration((edges[1] - edges[0]) / NS_PER_S)
    subtitle = f"share of prompt tokens, by the time of the decision in windows of {width}"
    legend = tuple((style, name) for name, style, _ in series)
    return Card(f"Routing: {predicted} and actual hits", subtitle, plot.svg(), legend, "full")


def routing_table(report: ReportData) -> str:
    """Tabulate the decisions and list the costliest; empty without decisions."""
    decisions, statistics = report.decisions, report.run.router
    if decisions is None or not len(decisions) or not statistics:
        return ""
    items = [
        f'<div><span data-tip="{escape(tip)}" tabindex="0">{name}</span><span>{percent(statistics[key])}</span></div>'
        for key, (name, tip) in _SUMMARY.items()
        if key in statistics
    ]
    items.append(
        '<div><span data-tip="Prompt tokens of the busiest worker ÷ mean." tabindex="0">imbalance</span>'
        f"<span>{significant(statistics['imbalance'])} ×</span></div>"
    )
    unit = f"{terms_of(report).block}s"
    for key, (name, tip) in _REGRETS.items():
        if key in statistics:
            items.append(
                f'<div><span data-tip="{tip.format(unit=unit)}" tabindex="0">{name}</span>'
                f'<span>{significant(statistics[key])} <span class="unit">{unit}</span></span></div>'
            )
    return (
        '<section class="card full"><div class="head"><h2>Routing</h2><span class="sub">'
        f"{len(decisions):,} decisions; hover over a name for its definition</span></div>"
        f'<div class="columns">{"".join(items)}</div>{_list_worst(report)}</section>'
    )


def _list_worst(report: ReportData) -> str:
    decisions = report.decisions
    assert decisions is not None
    if isinstance(decisions, Choices):
        return _list_worst_choices(report, decisions)
    timeline = report.columns
    order = np.argsort(-decisions.cost_regret, kind="stable")[:MAX_ROWS]
    regretted = [at for at in order.tolist() if decisions.cost_regret[at] > 0]
    title = "Choices with the largest regret" if regretted else "Choices with the largest cost"
    if not regretted:
        regretted = np.argsort(-decisions.cost, kind="stable")[:MAX_ROWS].tolist()
    lines = []
    for at in regretted:
        row = int(decisions.rows[at])
        blocks = -(-int(timeline.prompt_tokens[row]) // timeline.block_size)
        ties = int(decisions.ties[at])
        lines.append(
            f"<tr><td>{row}</td><td>{duration((int(decisions.time_ns[at]) - timeline.start_ns) / NS_PER_S)}</td>"
            f"<td>{decisions.worker[at]}</td><td>{decisions.cost[at]:,.1f}</td><td>{decisions.cost_regret[at]:,.1f}</td>"
            f"<td>{decisions.overlap_blocks[at]:,} of {blocks:,}</td><td>{decisions.true_overlap_blocks[at]:,}</td>"
            f"<td>{decisions.best_true_overlap_blocks[at]:,}</td>"
            f"<td>{int(timeline.cached_tokens_first[row]) // timeline.block_size:,}</td>"
            f'<td class="text">{f"random among {ties}" if ties > 1 else "lowest cost"}</td></tr>'
        )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("Request", "Time", "Worker", "Cost", "Regret", "Predicted", "Cached", "Best", "Actual")
    )
    return (
        f"<details open><summary>{title}</summary>"
        f'<div class="scroll"><table><thead><tr>{head}<th class="text">Reason</th></tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _list_worst_choices(report: ReportData, choices: Choices) -> str:
    """List the choices for which another worker had the most more of the prompt cached."""
    timeline = report.columns
    regret = choices.best_true_overlap_blocks - choices.true_overlap_blocks
    lines = []
    for at in np.argsort(-regret, kind="stable")[:MAX_ROWS].tolist():
        if regret[at] == 0:
            break
        row = int(choices.rows[at])
        blocks = -(-int(timeline.prompt_tokens[row]) // timeline.block_size)
        lines.append(
            f"<tr><td>{row}</td><td>{duration((int(choices.time_ns[at]) - timeline.start_ns) / NS_PER_S)}</td>"
            f"<td>{choices.worker[at]}</td><td>{regret[at]:,}</td>"
            f"<td>{choices.true_overlap_blocks[at]:,} of {blocks:,}</td>"
            f"<td>{choices.best_true_overlap_blocks[at]:,}</td>"
            f"<td>{int(timeline.cached_tokens_first[row]) // timeline.block_size:,}</td></tr>"
        )
    names = ("Request", "Time", "Worker", "Cache regret", "Cached", "Best", "Actual")
    head = "".join(f"<th>{name}</th>" for name in names)
    if not lines:
        return ""
    return (
        "<details open><summary>Choices with the largest cache regret</summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div></details>"
    )

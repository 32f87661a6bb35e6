"""Build a page that compares measured and simulated times of each benchmark."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.html.charts import HALF, SMALL, Card
from understudy.report.html.frame import THEME_BUTTON, build_document, prose
from understudy.report.html.plot import Plot
from understudy.report.html.scale import Scale, latency_label, latency_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from understudy.calibrate.benchmark import Benchmark
    from understudy.calibrate.simulate import Outcome
    from understudy.timing.timing_file import TimingFile

    Times = NDArray[np.float64]

_MEASURES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
_POINTS = 200
_LEGEND = (("base", "measured"), ("s1", "simulated"))
_STYLE = ".whole svg { min-width: 0; }"
"""Lets scatter plots shrink on a narrow screen, because both axes must stay visible."""


def page(
    file: TimingFile, benchmarks: Sequence[Benchmark], outcomes: Sequence[Outcome], notes: Sequence[str] = ()
) -> str:
    """Return the whole page as self-contained text, with the notes at the top."""
    deployment = file.deployment
    title = f"{file.model.name} on {deployment.parallel.gpus} × {file.gpu.name}"
    cards = [_means(benchmarks, outcomes)]
    for benchmark, outcome in zip(benchmarks, outcomes, strict=True):
        if benchmark.detailed:
            cards += [_section(card) for card in _detailed(benchmark, outcome)]
    header = (
        f'<header><div><h1>{escape(title)}</h1><div class="facts"><span>weights <b>{escape(file.weights)}</b></span>'
        f"<span>KV <b>{escape(file.kv)}</b></span><span>fitted <b>{escape(file.date)}</b> to "
        f"<b>{len(file.inputs)}</b> benchmark{'' if len(file.inputs) == 1 else 's'}</span>"
        f"<span>times from {escape(file.timing().describe_origin())}</span></div></div>{THEME_BUTTON}</header>"
    )
    items = "".join(f'<li class="note">{prose(note)}</li>' for note in notes)
    warnings = f'<ul class="verdicts">{items}</ul>' if items else ""
    body = (header, warnings, f'<div class="cards">{"".join(cards)}{_parameters(file)}</div>')
    footer = "Times are those at the client, if the benchmark measured them there. "
    return build_document(f"{title} · calibrated", body, footer=footer, style=_STYLE)


def _means(benchmarks: Sequence[Benchmark], outcomes: Sequence[Outcome]) -> str:
    rows = []
    for benchmark, outcome in zip(benchmarks, outcomes, strict=True):
        cells = ""
        for name in _MEASURES:
            measured = benchmark.means.get(name)
            if measured is None:
                cells += "<td>–</td><td>–</td><td>–</td>"
                continue
            simulated = outcome.mean(name)
            if math.isnan(simulated):
                cells += f"<td>{measured:,.2f}</td><td>–</td><td>–</td>"
                continue
            error = f"{simulated / measured - 1:+.1%}" if measured else "–"
            cells += f"<td>{measured:,.2f}</td><td>{simulated:,.2f}</td><td>{error}</td>"
        rows.append(
            f'<tr><td>{escape(benchmark.file)} <span class="unit">{escape(benchmark.format)}</span></td>'
            f"<td>{len(benchmark.load.workload):,}</td>{cells}</tr>"
        )
    head = "".join(f"<th>{name}</th><th>simulated</th><th>error</th>" for name in _MEASURES.values())
    return (
        '<section class="card full"><div class="head"><h2>Means</h2><span class="sub">milliseconds, measured and '
        f'simulated</span></div><div class="scroll"><table><thead><tr><th>Benchmark</th><th>Requests</th>{head}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _parameters(file: TimingFile) -> str:
    rows = "".join(
        f"<tr><td>{escape(one.name)}</td><td>{one.value:.4g}</td><td>± {one.plus_minus_percent:.1f} %</td>"
        f'<td>{one.preset:.4g}</td><td class="text">{escape(one.describe_determination())}</td>'
        "</tr>"
        for one in file.fitted
    )
    return (
        '<section class="card full"><div class="head"><h2>Parameters</h2><span class="sub">as fitted</span></div>'
        '<div class="scroll"><table><thead><tr><th>Parameter</th><th>Value</th><th>Uncertainty</th><th>Preset</th>'
        f'<th class="text">Determined by the data</th></tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _detailed(benchmark: Benchmark, outcome: Outcome) -> list[Card]:
    cards = []
    for name, short in _MEASURES.items():
        measured, simulated = getattr(benchmark, name), getattr(outcome, name)
        both = np.isfinite(measured) & np.isfinite(simulated)
        if both.any():
            cards.append(_cdf(benchmark.file, short, measured[both], simulated[both]))
    for name, short in (("ttft_ms", "TTFT"), ("e2e_ms", "E2E")):
        measured, simulated = getattr(benchmark, name), getattr(outcome, name)
        both = np.isfinite(measured) & np.isfinite(simulated)
        cards.append(_scatter(benchmark.file, short, measured[both], simulated[both]))
    return cards


def _cdf(file: str, name: str, measured: Times, simulated: Times) -> Card:
    shares = np.linspace(0, 1, _POINTS)
    lines = [np.quantile(values, shares) for values in (measured, simulated)]
    x = latency_scale(np.concatenate(lines), SMALL.x, log=_needs_log_scale(np.concatenate(lines)))
    plot = Plot(
        SMALL, x, Scale.linear(1, SMALL.y, label=lambda share: f"{share:.0%}"), f"Distribution of {name}"
    )
    for values, (style, _) in zip(lines, _LEGEND, strict=True):
        plot.line(values, shares, style)
    return Card(f"{name}, distribution", file, plot.svg(), _LEGEND, "third")


def _scatter(file: str, name: str, measured: Times, simulated: Times) -> Card:
    everything = np.concatenate([measured, simulated])
    log = _needs_log_scale(everything)
    x, y = latency_scale(everything, HALF.x, log=log), latency_scale(everything, HALF.y, log=log)
    plot = Plot(HALF, x, y, f"{name} of each request: simulated against measured")
    ends = np.array([x.low, x.high])
    plot.line(ends, ends, "base")
    plot.dots(measured, simulated, "s1")
    plot.on_hover_dots(
        measured,
        simulated,
        [
            f"request {row}: measured {latency_label(a)}, simulated {latency_label(b)}"
            for row, (a, b) in enumerate(zip(measured.tolist(), simulated.tolist(), strict=True))
        ],
    )
    legend = (("base", "equal"), ("s1", "request"))
    return Card(
        f"{name} of each request",
        f"{file}: simulated (vertical) against measured (horizontal)",
        plot.svg(),
        legend,
        "half whole",
    )


def _needs_log_scale(values: Times) -> bool:
    positive = values[values > 0]
    return bool(len(positive)) and float(positive.max() / positive.min()) > 20


def _section(card: Card) -> str:
    keys = "".join(f'<span><i class="key {style}"></i>{escape(name)}</span>' for style, name in card.legend)
    return (
        f'<section class="card {card.span}"><div class="head"><h2>{escape(card.title)}</h2>'
        f'<span class="sub">{escape(card.subtitle)}</span><div class="legend">{keys}</div></div>{card.figure}</section>'
    )

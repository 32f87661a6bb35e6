"""Plots of a sweep's page: cost against requests in time, and parallel coordinates."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.report.html.charts import FULL, Card
from understudy.report.html.plot import BOTTOM, TOP, Plot, Size, number
from understudy.report.html.scale import LOG_FROM_RATIO, Scale
from understudy.report.worst_hour import format_length
from understudy.sweep.candidate import format_flags
from understudy.sweep.text import describe_fleet
from understudy.text import compact

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from understudy.sweep.answer import Answer
    from understudy.sweep.result import Sweep
    from understudy.sweep.space import Point
    from understudy.sweep.trials import Trial

_HEIGHT = 330
_MAX_TICKS = 10


def plot_front(sweep: Sweep, answer: Answer, trials: Sequence[Trial], reports: Mapping[Point, str]) -> Card:
    """Plot every trial by cost and requests in time, with the front and the goal; markers link to reports."""
    costs = np.array([trial.cost for trial in trials])
    good = np.array([100 * trial.judged for trial in trials])
    x = (
        Scale.logarithmic(float(costs.min()), float(costs.max()), FULL.x)
        if costs.max() / costs.min() > LOG_FROM_RATIO
        else Scale.linear(float(costs.max()), FULL.x)
    )
    y = Scale.linear(100, FULL.y, label=lambda value: f"{value:g} %")
    plot = Plot(FULL, x, y, "Requests in time by cost of the fleet")
    plot.dots(costs, good, "s3 few")
    front = sorted(answer.front, key=lambda trial: trial.cost)
    plot.line(
        np.array([trial.cost for trial in front]), np.array([100 * trial.judged for trial in front]), "s1"
    )
    plot.rule(100 * sweep.goal, f"goal {100 * sweep.goal:g} %", "s4", at_left=True)
    for trial in front:
        plot.marker(trial.cost, 100 * trial.judged, "s2" if trial is answer.best else "s1")
        if trial.point in reports:
            plot.marks[-1] = f'<a href="{escape(reports[trial.point])}">{plot.marks[-1]}</a>'
    labels = [
        f"{describe_fleet(sweep, trial)}: {trial.judged:.2%}, {format_flags(trial.flags)}" for trial in trials
    ]
    plot.on_hover_dots(costs, good, labels)
    unit = "$ per hour" if sweep.has_prices else "GPUs"
    legend = (("s3 solid", "candidate"), ("s1", "front"), ("s2 solid", "answer"))
    window = sweep.goal_window_s
    windows = "" if window is None else f" in the worst window of {format_length(window)}"
    return Card("Requests in time by cost", f"{unit}, % of requests{windows}", plot.svg(), legend, "full")


def plot_coordinates(sweep: Sweep, answer: Answer, trials: Sequence[Trial]) -> Card:
    """Plot every trial as a line over the varied flags, its cost and its requests in time."""
    size = Size(FULL.width, _HEIGHT)
    top, bottom = TOP + 26, _HEIGHT - BOTTOM + 12
    axes = _list_axes(sweep, trials)
    left, right = 40, size.width - 60
    places = np.linspace(left, right, len(axes))
    heights = np.array([bottom - (bottom - top) * axis.heights for axis in axes])
    parts = []
    order = sorted(range(len(trials)), key=lambda at: (trials[at] is answer.best, trials[at].judged))
    for at in order:
        meets = trials[at].judged >= sweep.goal
        style = "chosen s2" if trials[at] is answer.best else f"many {'s4' if meets else 'base'}"
        steps = zip(places, heights[:, at], strict=True)
        points = "L".join(f"{number(float(px))} {number(float(py))}" for px, py in steps)
        parts.append(f'<path class="{style}" d="M{points}"/>')
    for place, axis in zip(places, axes, strict=True):
        px = number(float(place))
        anchor = "start" if place == places[0] else "end" if place == places[-1] else "middle"
        begin = px - 30 if anchor == "start" else px + 50 if anchor == "end" else px
        parts.append(f'<path class="axis" d="M{px} {top}V{bottom}"/>')
        parts.append(
            f'<text class="note strong" x="{begin}" y="{top - 12}" text-anchor="{anchor}">{escape(axis.name)}</text>'
        )
        for share, label in axis.ticks:
            py = number(bottom - (bottom - top) * share)
            parts.append(f'<text class="note" x="{px + 6}" y="{py}" dy=".32em">{escape(label)}</text>')
    hover = {
        "px": [number(float(places[-1]))] * len(trials),
        "py": [number(float(py)) for py in heights[-1]],
        "label": [f"{trial.judged:.2%}: {format_flags(trial.flags)}" for trial in trials],
        "series": [],
    }
    data = msgspec.json.encode(hover).decode().replace("<", "\\u003c")
    figure = (
        f'<div class="plot"><svg viewBox="0 0 {size.width} {size.height}" role="img" aria-label="Candidates as lines '
        f'over the varied flags">{"".join(parts)}<path class="cross" d=""/></svg>'
        f'<script type="application/json">{data}</script></div>'
    )
    legend = (("s4", "meets the goal"), ("base", "misses it"), ("s2", "answer"))
    return Card("Candidates over the varied flags", "one line each", figure, legend, "full")


class _Axis:
    """One axis of the parallel coordinates: heights of the trials and of the ticks, from 0 to 1."""

    def __init__(self, name: str, values: Sequence[float], ticks: Sequence[tuple[float, str]]) -> None:
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        span = high - low or 1.0
        self.name = name
        self.heights = (np.array(values) - low) / span if high > low else np.full(len(values), 0.5)
        self.ticks = [
            ((at - low) / span if high > low else 0.5, label) for at, label in ticks if low <= at <= high
        ]


def _list_axes(sweep: Sweep, trials: Sequence[Trial]) -> list[_Axis]:
    axes = []
    for place, dimension in enumerate(sweep.space.dimensions):
        values = [float(trial.point[place]) for trial in trials]
        step = -(-len(dimension.texts) // _MAX_TICKS)
        ticks = [(float(at), dimension.texts[at] or "none") for at in range(0, len(dimension.texts), step)]
        axes.append(_Axis(dimension.flag, values, ticks))
    costs = [trial.cost for trial in trials]
    shares = [100 * trial.judged for trial in trials]
    axes.append(_Axis("$ per hour" if sweep.has_prices else "GPUs", costs, _list_ticks(costs, "")))
    axes.append(_Axis("in time", shares, _list_ticks(shares, " %")))
    return axes


def _list_ticks(values: Sequence[float], unit: str) -> list[tuple[float, str]]:
    low, high = min(values), max(values)
    inner = Scale.linear(high, (0, 1), low=low).ticks
    gap = (high - low) / 15
    kept = [(at, f"{label}{unit}") for at, label in inner if low + gap < at < high - gap]
    return [
        (low, f"{compact(low)}{unit}"),
        *kept,
        *([(high, f"{compact(high)}{unit}")] if high > low else []),
    ]

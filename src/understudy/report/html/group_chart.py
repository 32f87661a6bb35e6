"""Plot the blocks that requests hold in each KV cache group."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.html.charts import FULL, Card, time_axis
from understudy.report.html.plot import HoverSeries, Plot
from understudy.report.html.scale import Scale
from understudy.report.latency import NS_PER_S
from understudy.text import quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.report.data import ReportData
    from understudy.run.group_facts import GroupUse

_STYLES = ("s1", "s4", "s2", "s5", "s3")
_KINDS = {
    "full_attention": "full attention",
    "mla_attention": "MLA",
    "sliding_window": "window",
    "sliding_window_mla": "MLA window",
    "chunked_local_attention": "local chunks",
    "mamba": "state",
}


def group_card(report: ReportData) -> Card | None:
    """Plot held blocks over time, equal groups as one line; None for a run with one group."""
    found = report.run.kv_groups
    if found is None:
        return None
    x, seconds = time_axis(report, FULL)
    top = max(max(group.held_blocks, default=0) for group in found.groups)
    y = Scale.linear(max(top, 1), FULL.y, label=lambda blocks: f"{blocks:,.0f}")
    plot = Plot(FULL, x, y, "Blocks held by each KV cache group over time")
    start_s = report.columns.start_ns / NS_PER_S
    xs = (np.asarray(found.time_s) - start_s) / seconds
    series = []
    for place, (group, numbers) in enumerate(_merge_equal(found.groups)):
        style = _STYLES[place % len(_STYLES)] + (" thin" if place >= len(_STYLES) else "")
        each = " (each)" if len(numbers) > 1 else ""
        plot.line(xs, np.asarray(group.held_blocks, np.float64), style)
        texts = [f"{blocks:,}" for blocks in group.held_blocks]
        series.append(HoverSeries(f"{_format_numbers(numbers)}: {_name(group)}{each}", style, texts))
    plot.on_hover(xs, [f"{time:.1f} s" for time in found.time_s], series)
    legend = tuple((one.style, one.name) for one in series)
    full = found.full_attention_hit_ratio
    alone = "" if full is None else f", full attention alone {quantity(full, 'ratio')}"
    subtitle = (
        f"blocks held by running requests, all workers; pool {_format_pool(report)} blocks; "
        f"{quantity(found.hit_ratio, 'ratio')} of tokens hit{alone}"
    )
    return Card("KV cache groups", subtitle, plot.svg(), legend, "full")


def _merge_equal(groups: Sequence[GroupUse]) -> list[tuple[GroupUse, list[int]]]:
    """Return groups that differ, each with the numbers of all groups that are equal to it."""
    merged: list[tuple[GroupUse, list[int]]] = []
    for number, group in enumerate(groups):
        numbers = next((numbers for one, numbers in merged if one == group), None)
        if numbers is None:
            merged.append((group, [number]))
        else:
            numbers.append(number)
    return merged


def _name(group: GroupUse) -> str:
    kind = _KINDS.get(group.kind, group.kind)
    return kind if group.window is None else f"{kind} {group.window:,}"


def _format_numbers(numbers: Sequence[int]) -> str:
    """Return ascending numbers with ranges, such as 0-5, 7."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _format_pool(report: ReportData) -> str:
    """Return the workers and their blocks, such as 4 × 114,910."""
    sizes = np.unique(report.columns.worker_blocks, return_counts=True)
    return " + ".join(f"{workers:,} × {blocks:,}" for blocks, workers in zip(*sizes, strict=True))

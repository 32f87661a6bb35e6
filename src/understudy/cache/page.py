"""Build the page of a cache study: the curve with the fleet's point, and its tables."""

from __future__ import annotations

import math
from html import escape
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np

from understudy.cache.text import (
    GAP_WORDS,
    NAMES,
    TIERS_WORDS,
    format_size,
    percent,
    prefix_rows,
    replay_rows,
    size_rows,
    summary_lines,
    tier_rows,
)
from understudy.report.html.charts import FULL, Card, render_card
from understudy.report.html.frame import THEME_BUTTON, build_document, prose
from understudy.report.html.plot import HoverSeries, Plot
from understudy.report.html.scale import Scale
from understudy.text import compact, significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.cache.study import CacheStudy, Point
    from understudy.report.statistics import Float64Column

_PALETTE = ("s2", "s3", "s4", "s5")
_BOUNDS = {"optimal": "base", "optimal_pinned": "base ink"}
"""Line styles of bounds: grey and ink."""


def build_page(study: CacheStudy) -> str:
    """Return the study as one self-contained HTML document."""
    facts = [
        f"<b>{study.requests:,}</b> requests",
        f"blocks of <b>{study.block_size}</b> tokens",
        f"<b>{study.block_visits:,}</b> block visits",
        f"<b>{study.distinct_blocks:,}</b> distinct blocks",
        "in the order of the replay"
        if study.order == "replay"
        else "one request at a time, in the order of time",
    ]
    body = [
        f"<header><div><h1>Prefix cache of {escape(study.workload)}</h1>"
        f'<div class="facts">{"".join(f"<span>{fact}</span>" for fact in facts)}</div></div>{THEME_BUTTON}</header>',
        _tiles(study),
        '<div class="cards">',
        render_card(_curve(study)),
        _table("Hit ratio by size", "of a worker's cache, by eviction policy", *size_rows(study), 0),
        _table("Replayed", _describe_replays(study), *replay_rows(study), 2) if study.replays else "",
        _table(
            "Tiers below the device",
            TIERS_WORDS,
            *tier_rows(study),
            1,
        )
        if study.tiers
        else "",
        _table(
            "Prefixes that cost most",
            f"reads × length; recomputed by an LRU cache of {study.studied_blocks:,} blocks",
            *prefix_rows(study),
            1,
        )
        if study.prefixes
        else "",
        "</div>",
        f'<ul class="verdicts">{"".join(f"<li>{prose(line)}</li>" for line in summary_lines(study))}'
        f"{''.join(f'<li class=note>{prose(note)}</li>' for note in study.notes)}</ul>",
    ]
    return build_document(f"Prefix cache of {study.workload}", body, style=_STYLE)


def _describe_replays(study: CacheStudy) -> str:
    words = f"; {GAP_WORDS}" if any(one.gap is not None for one in study.replays) else ""
    return f"times from {study.times}{words}"


_STYLE = "main > .verdicts { margin: 12px 0 0; border-left-color: var(--s1); }"


def _tiles(study: CacheStudy) -> str:
    shown = []
    if (fleet := study.fleet) is not None:
        shown += [
            (
                "This fleet, replayed",
                percent(fleet.replayed_hit_ratio, 1),
                f"{format_size(fleet.blocks, fleet.gib)}"
                + (f" on each of {fleet.workers} workers, {fleet.routing}" if fleet.workers > 1 else ""),
            ),
            (
                "Best eviction at this size",
                percent(fleet.optimal_pinned_hit_ratio, 1),
                "optimal, with running blocks pinned",
            ),
        ]
    if (knee := study.knee) is not None:
        more = f"{percent(knee.hit_ratio, 1)} hit; 1 GiB more adds less than {knee.points_per_gib:g} points"
        shown.append(("Knee of the LRU curve", format_size(knee.blocks, knee.gib), more))
    routed = study.routed_hit_ratio
    more = "of prompt tokens hit" if routed is None else f"{percent(routed, 1)} with a cache per worker"
    shown.append(("Unlimited cache", percent(study.unlimited_hit_ratio, 1), more))
    return '<div class="tiles">{}</div>'.format(
        "".join(
            f'<div class="tile"><div class="what">{escape(what)}</div><div class="value">{escape(value)}</div>'
            f'<div class="more">{escape(more)}</div></div>'
            for what, value, more in shown
        )
    )


def _curve(study: CacheStudy) -> Card:
    """Plot all policies by size, with the fleet's point, the knee and the limit."""
    in_gib = study.kv_bytes_per_token is not None

    def at(point: Point) -> float:
        return float(point.blocks) if point.gib is None else point.gib

    curve, sizes = study.lru_curve, study.sizes
    xs: Float64Column = np.array([at(point) for point in curve])
    lru = np.array([point.hit_ratio["lru"] for point in curve])
    grid: Float64Column = np.array([at(point) for point in sizes])
    ratios = {policy: np.array([point.hit_ratio[policy] for point in sizes]) for policy in study.policies}
    limit, name = study.unlimited_hit_ratio, "unlimited"
    if study.routed_hit_ratio is not None:  # the caches of the curve
        limit, name = study.routed_hit_ratio, "unlimited, a cache per worker"
    highest = max([limit, *(float(each.max()) for each in ratios.values()), 0.01])
    x = Scale.logarithmic(float(xs[0]), float(xs[-1]), FULL.x)
    y = Scale.linear(highest, FULL.y, label=lambda value: percent(value, 0))
    plot = Plot(FULL, x, y, f"Prefix hit ratio by cache size in {'GiB' if in_gib else 'blocks'}")
    plot.rule(limit, f"{name} {percent(limit, 1)}", "base", at_left=True)
    shown = [policy for policy in study.policies if policy != "lru"]
    styles = {"lru": "s1", **_BOUNDS}
    styles |= dict(zip([policy for policy in shown if policy not in _BOUNDS], cycle(_PALETTE), strict=False))
    for policy in shown:
        plot.line(grid, ratios[policy], styles[policy])
        for size, ratio in zip(grid.tolist(), ratios[policy].tolist(), strict=True):
            plot.marker(size, ratio, styles[policy])  # computed sizes; the line between them is a guess
    plot.area(xs, np.zeros(len(xs)), lru, "s1")
    plot.line(xs, lru, "s1")
    if (fleet := study.fleet) is not None:
        where = float(fleet.blocks) if fleet.gib is None else fleet.gib
        label = f"this fleet: {percent(fleet.replayed_hit_ratio, 1)} replayed"
        plot.upright(where, label, "base", low=fleet.lru_hit_ratio > 0.5 * y.high)
        if not math.isnan(fleet.replayed_hit_ratio):  # a fleet that admitted no request has no ratio
            plot.marker(where, fleet.replayed_hit_ratio, "s2")
    if (knee := study.knee) is not None and xs[0] <= knee.gib <= xs[-1]:
        low = knee.hit_ratio > 0.5 * y.high
        plot.upright(knee.gib, f"knee: {significant(knee.gib)} GiB", "base", row=1, low=low)
    labels = [format_size(point.blocks, point.gib) + f", {compact(point.blocks)} blocks" for point in curve]
    series = [HoverSeries(NAMES["lru"], "s1", [percent(value) for value in lru.tolist()])]
    for policy in shown:
        # A hover shows the policy at the nearest computed size, and nothing between.
        nearest = np.abs(np.log(xs[None, :]) - np.log(grid[:, None])).argmin(axis=1)
        texts = [""] * len(xs)
        for place, value in zip(nearest.tolist(), ratios[policy].tolist(), strict=True):
            texts[place] = percent(value)
        series.append(HoverSeries(NAMES[policy], styles[policy], texts))
    plot.on_hover(xs, labels, series)
    unit = "GiB" if in_gib else "blocks"
    return Card(
        "Hit ratio by cache size",
        f"share of prompt tokens; {unit} of a worker's cache, log scale; dots are computed, optimal is a bound",
        plot.svg(),
        tuple((styles[policy], NAMES[policy]) for policy in ["lru", *shown]),
        "full",
    )


def _table(title: str, about: str, head: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="text">{escape(cell)}</{tag}>' if at < texts else f"<{tag}>{escape(cell)}</{tag}>"
            for at, cell in enumerate(cells)
        )

    lines = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in rows)
    return (
        f'<section class="card full"><div class="head"><h2>{escape(title)}</h2><span class="sub">{escape(about)}</span>'
        f'</div><div class="scroll"><table><thead><tr>{row(head, "th")}</tr></thead><tbody>{lines}</tbody></table>'
        "</div></section>"
    )

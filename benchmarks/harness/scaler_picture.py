"""Draws scalers, static fleets and a schedule that knows the load as cost against goodput."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from understudy.report.html.plot import Plot, Size
from understudy.report.html.scale import Scale

if TYPE_CHECKING:
    from collections.abc import Mapping

    Point = tuple[float, float]
    """GPU seconds, and good requests in percent."""

SIZE = Size(760, 420)
RISES = {"dynamo-load": 4, "hpa": -14, "schedule that knows the load": 10}
"""Pixels from a point up to the foot of its label, where those of others are near."""
STYLE = """
svg { background: #fff; font: 12px system-ui, sans-serif; }
.grid { stroke: #e3e6ea; } .axis, .tickmark { stroke: #8c959f; }
.tick { fill: #57606a; } .note { fill: #57606a; } .strong { fill: #1f2328; font-weight: 600; }
.line { fill: none; stroke: #8c959f; stroke-width: 1.5; stroke-dasharray: 4 3; }
.marker { stroke: #fff; stroke-width: 1.5; } circle.base { fill: #8c959f; } .s1 { fill: #0969da; }
.s2 { fill: #bc4c00; } .s3 { fill: #1a7f37; }
"""


def draw(scalers: Mapping[str, Point], static: Mapping[int, Point]) -> str:
    """Return the picture as SVG text: up and left is better."""
    cost = max(gpu_s for gpu_s, _ in (*scalers.values(), *static.values()))
    plot = Plot(
        SIZE,
        Scale.linear(cost, SIZE.x),
        Scale.linear(112.0, SIZE.y, exact=True),
        "Good requests over GPU seconds, by scaler",
    )
    points = [static[workers] for workers in sorted(static)]
    plot.line(np.array([gpu_s for gpu_s, _ in points]), np.array([good for _, good in points]), "base")
    for workers, (gpu_s, good) in static.items():
        plot.marker(gpu_s, good, "base")
        plot.marks.append(_label(plot, gpu_s, good, str(workers), "note", below=True))
    for name, (gpu_s, good) in scalers.items():
        style = "s1" if name == "backlog" else "s3" if name.startswith("schedule") else "s2"
        plot.marker(gpu_s, good, style)
        plot.marks.append(_label(plot, gpu_s, good, name, "note strong", rise=RISES.get(name, -4)))
    left, right = SIZE.x
    bottom, top = SIZE.y
    plot.marks.append(
        f'<text class="note" x="{right}" y="{bottom - 8}" text-anchor="end">GPU seconds</text>'
        f'<text class="note" x="{left + 6}" y="{top + 8}">good requests, %</text>'
        f'<text class="note" x="{right}" y="{bottom - 26}" text-anchor="end">grey: static fleets by workers</text>'
    )
    whole = plot.svg()
    inside = whole[whole.index("<svg ") + 5 : whole.index("</svg>")]
    head, _, rest = inside.partition(">")
    return f'<svg xmlns="http://www.w3.org/2000/svg" {head}><style>{STYLE}</style>{rest}</svg>\n'


def _label(
    plot: Plot, gpu_s: float, good: float, text: str, style: str, *, below: bool = False, rise: int = -4
) -> str:
    x, y = plot.x.pixel(gpu_s), plot.y.pixel(good)
    at = (
        f'x="{x:.1f}" y="{y + 17:.1f}" text-anchor="middle"'
        if below
        else f'x="{x + 8:.1f}" y="{y - rise:.1f}"'
    )
    return f'<text class="{style}" {at}>{escape(text)}</text>'

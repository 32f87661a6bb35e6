"""Build plots as inline SVG: axes, marks, and the data that the page's script shows on hover."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.report.html.scale import Scale
    from understudy.report.statistics import Float64Column

LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 30
LABEL_GAP = 6


@dataclass(frozen=True, slots=True)
class Size:
    """Outer size of a plot and, derived, the box that its axes span."""

    width: int
    height: int

    @property
    def x(self) -> tuple[float, float]:
        """Pixels of the x axis, left to right."""
        return LEFT, self.width - RIGHT

    @property
    def y(self) -> tuple[float, float]:
        """Pixels of the y axis, bottom to top."""
        return self.height - BOTTOM, TOP


@dataclass(slots=True)
class Plot:
    """Collects the marks of a plot. `style` is a CSS class: s1 … s4 are the palette, base the baseline."""

    size: Size
    x: Scale
    y: Scale
    title: str
    """Text for screen readers."""
    marks: list[str] = field(default_factory=list)
    hover: dict[str, Any] | None = None

    def line(self, xs: Float64Column, ys: Float64Column, style: str) -> None:
        """Draw a line through the points; NaN interrupts it."""
        if not len(xs):
            return
        self.marks.append(f'<path class="line {style}" d="{path(self.x.pixels(xs), self.y.pixels(ys))}"/>')

    def steps(self, xs: Float64Column, ys: Float64Column, style: str) -> None:
        """Draw a step function with value ys[i] from xs[i] on."""
        points = zip(round_pixels(self.x.pixels(xs)), round_pixels(self.y.pixels(ys)), strict=True)
        stairs = "".join(f"H{x}V{y}" for x, y in points)
        start = f"M{round_pixels(self.x.pixels(xs[:1]))[0]} {number(self.y.start)}"
        self.marks.append(f'<path class="line {style}" d="{start}{stairs}"/>')

    def area(self, xs: Float64Column, low: Float64Column, high: Float64Column, style: str) -> None:
        """Fill the area between two lines; NaN interrupts it."""
        valid = ~(np.isnan(low) | np.isnan(high))
        pieces = np.split(np.arange(len(xs)), np.flatnonzero(np.diff(valid)) + 1)
        shape = ""
        for piece in pieces:
            if len(piece) and valid[piece[0]]:
                there = path(self.x.pixels(xs[piece]), self.y.pixels(high[piece]))
                back = path(self.x.pixels(xs[piece][::-1]), self.y.pixels(low[piece][::-1]))
                shape += f"{there}L{back[1:]}Z"
        self.marks.append(f'<path class="area {style}" d="{shape}"/>')

    def dots(self, xs: Float64Column, ys: Float64Column, style: str) -> None:
        """Draw a dot for each point."""
        points = zip(round_pixels(self.x.pixels(xs)), round_pixels(self.y.pixels(ys)), strict=True)
        self.marks.append(f'<path class="dots {style}" d="{"".join(f"M{x} {y}h0" for x, y in points)}"/>')

    def rule(self, value: float, label: str, style: str, at_left: bool = False) -> None:
        """Draw a horizontal line across the plot, labelled at its right or left end unless the label is empty."""
        left, right = self.size.x
        y = self.y.pixel(value)
        above = y - LABEL_GAP if y > TOP + 16 else y + 15
        x, anchor = (left + LABEL_GAP, "start") if at_left else (right, "end")
        self.marks.append(f'<path class="rule {style}" d="M{left} {number(y)}H{right}"/>')
        if label:
            self.marks.append(
                f'<text class="note {style}" x="{x}" y="{number(above)}" text-anchor="{anchor}">{escape(label)}</text>'
            )

    def upright(self, value: float, label: str, style: str, *, row: int = 0, low: bool = False) -> None:
        """Draw a vertical line, labelled on the side with room, `row` lines below the top (`low`: above the foot)."""
        left, right = self.size.x
        bottom, top = self.size.y
        x = self.x.pixel(value)
        at, anchor = (x - LABEL_GAP, "end") if x > (left + right) / 2 else (x + LABEL_GAP, "start")
        y = bottom - 12 - 18 * row if low else top + 44 + 18 * row
        self.marks.append(
            f'<path class="rule {style}" d="M{number(x)} {number(bottom)}V{number(top)}"/>'
            f'<text class="note {style}" x="{number(at)}" y="{number(y)}" text-anchor="{anchor}">'
            f"{escape(label)}</text>"
        )

    def marker(self, x: float, y: float, style: str) -> None:
        """Draw a point."""
        px, py = number(self.x.pixel(x)), number(self.y.pixel(y))
        self.marks.append(f'<circle class="marker {style}" cx="{px}" cy="{py}" r="3.5"/>')

    def corner(self, lines: Sequence[tuple[str, str]], lower_right: bool) -> None:
        """Write names and values into the lower right or the upper left corner."""
        left = self.size.width - RIGHT - 96 if lower_right else LEFT + 14
        top = self.size.y[0] - 16 * len(lines) + 4 if lower_right else TOP + 14
        for index, (name, value) in enumerate(lines):
            y = number(top + 16 * index)
            self.marks.append(
                f'<text class="note" x="{left}" y="{y}">{escape(name)}'
                f'<tspan class="note strong" dx="8">{escape(value)}</tspan></text>'
            )

    def on_hover(self, xs: Float64Column, labels: Sequence[str], series: Sequence[HoverSeries]) -> None:
        """Show the label and one line per series of the point nearest in x on hover."""
        self.hover = {
            "px": round_pixels(self.x.pixels(xs)),
            "label": list(labels),
            "series": [{"name": one.name, "style": one.style, "text": list(one.texts)} for one in series],
        }

    def on_hover_dots(self, xs: Float64Column, ys: Float64Column, labels: Sequence[str]) -> None:
        """Show the label of the nearest dot on hover."""
        self.hover = {
            "px": round_pixels(self.x.pixels(xs)),
            "py": round_pixels(self.y.pixels(ys)),
            "label": list(labels),
            "series": [],
        }

    def svg(self) -> str:
        """Return the figure: axes, marks and hover data."""
        width, height = self.size.width, self.size.height
        data = ""
        if self.hover is not None:
            text = msgspec.json.encode(self.hover).decode().replace("<", "\\u003c")
            data = f'<script type="application/json">{text}</script>'
        return (
            f'<div class="plot"><svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(self.title)}" '
            f'data-top="{TOP}" data-bottom="{height - BOTTOM}">{self._axes()}{"".join(self.marks)}'
            f'<path class="cross" d=""/></svg>{data}</div>'
        )

    def _axes(self) -> str:
        left, right = self.size.x
        bottom, _ = self.size.y
        parts = []
        for value, label in self.y.ticks:
            y = number(self.y.pixel(value))
            parts.append(
                f'<path class="grid" d="M{left} {y}H{right}"/>'
                f'<text class="tick" x="{left - 8}" y="{y}" dy=".32em" text-anchor="end">{escape(label)}</text>'
            )
        for value, label in self.x.ticks:
            x = number(self.x.pixel(value))
            # Keep the last label inside the picture.
            anchor, at = ("end", self.size.width - 2) if x > right - 3 * len(label) + 10 else ("middle", x)
            parts.append(
                f'<path class="tickmark" d="M{x} {number(bottom)}v4"/>'
                f'<text class="tick" x="{at}" y="{number(bottom + 18)}" text-anchor="{anchor}">{escape(label)}</text>'
            )
        parts.append(f'<path class="axis" d="M{left} {number(bottom)}H{right}"/>')
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class HoverSeries:
    """One line of a tooltip: a name, its style, and the text at each point (empty texts are hidden)."""

    name: str
    style: str
    texts: Sequence[str]


def path(xs: Float64Column, ys: Float64Column) -> str:
    """Return an SVG path through pixels; NaN interrupts it."""
    out = []
    pen = "M"
    for x, y in zip(round_pixels(xs), round_pixels(ys), strict=True):
        if x is None or y is None:
            pen = "M"
        else:
            out.append(f"{pen}{x} {y}")
            pen = "L"
    return "".join(out)


def round_pixels(values: Float64Column) -> list[float | int | None]:
    """Round pixels to a tenth; NaN becomes None."""
    return [None if value != value else number(value) for value in np.round(values, 1).tolist()]


def number(value: float) -> float | int:
    """Round to a tenth; return an int for whole numbers."""
    rounded = round(value, 1)
    return int(rounded) if rounded == int(rounded) else rounded

"""Scales map values to pixels and choose round tick values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from understudy.text import compact, significant

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.report.statistics import Float64Column

LOG_FROM_RATIO = 20  # a wider range of values is easier to read on a logarithmic axis


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps [low, high] to pixels [start, end]; values outside are clipped to the border."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    @classmethod
    def linear(
        cls,
        high: float,
        pixels: tuple[float, float],
        *,
        low: float = 0.0,
        target: int = 5,
        label: Callable[[float], str] = compact,
        exact: bool = False,
    ) -> Scale:
        """Create a scale from `low` to `high`, rounded up to the next tick unless `exact`."""
        if not high > low:
            high = low + 1
        step = nice_step((high - low) / target)
        top = high if exact else math.ceil(round(high / step, 9)) * step
        first = math.ceil(round(low / step, 9))
        last = math.floor(round(top / step, 9))
        ticks = tuple((n * step, label(n * step)) for n in range(first, last + 1))
        return cls(low, top, *pixels, ticks)

    @classmethod
    def logarithmic(
        cls, low: float, high: float, pixels: tuple[float, float], label: Callable[[float], str] = compact
    ) -> Scale:
        """Create a logarithmic scale over 0 < low ≤ high."""
        if high / low < 1.5:
            low, high = low / 1.3, high * 1.3
        decades = math.log10(high / low)
        steps = (1, 2, 5) if decades < 2.2 else (1, 3) if decades < 3.5 else (1,)
        exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        values = [step * 10.0**exponent for exponent in exponents for step in steps]
        ticks = tuple((value, label(value)) for value in values if low * 0.999 <= value <= high * 1.001)
        return cls(low, high, *pixels, ticks, log=True)

    def pixels(self, values: Float64Column) -> Float64Column:
        """Return the pixel of each value; NaN stays NaN."""
        low, high = self.low, self.high
        inside = np.clip(values, low, high)
        share = (inside - low) / (high - low)
        if self.log:
            share = np.log(inside / low) / math.log(high / low)
        return self.start + share * (self.end - self.start)

    def pixel(self, value: float) -> float:
        """Return the pixel of one value."""
        return float(self.pixels(np.array([value]))[0])


def nice_step(rough: float) -> float:
    """Return the smallest 1, 2 or 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= rough * 0.999), 10 * power)


def time_unit(span_s: float) -> tuple[float, str]:
    """Return a suitable unit for a duration: its length in seconds and its name."""
    for seconds, name, at_least in ((3600.0, "h", 3.0), (60.0, "min", 3.0), (1.0, "s", 2.0)):
        if span_s >= at_least * seconds:
            return seconds, name
    return 1e-3, "ms"


def latency_label(milliseconds: float) -> str:
    """Format a latency with its unit."""
    if milliseconds >= 1000:
        return f"{significant(milliseconds / 1000)} s"
    if milliseconds >= 1 or milliseconds == 0:
        return f"{significant(milliseconds)} ms"
    return f"{significant(milliseconds * 1000)} µs"


def latency_scale(values_ms: Float64Column, pixels: tuple[float, float], log: bool) -> Scale:
    """Create a scale for latencies; with `log` a logarithmic one, with zeros at the border."""
    positive = values_ms[values_ms > 0]
    if log and len(positive):
        return Scale.logarithmic(float(positive.min()), float(positive.max()), pixels, latency_label)
    return Scale.linear(float(values_ms.max(initial=0)), pixels, label=latency_label)

"""Numbers within bounds, those nearest to zero first."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import count
from typing import TYPE_CHECKING

from understudy.server.api.structured.values import is_multiple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.server.api.structured.constraints import Constraints
    from understudy.server.api.structured.errors import Steps

_MAX_MISSES = 4096
"""Numbers in a row that may turn out unsuitable as floats."""
_DIGITS = 17


def numbers_of(wanted: Constraints, steps: Steps, *, whole: bool) -> Iterator[float]:
    """Yield integers, or numbers that are none, within the bounds and multiples asked for."""
    grid = [Fraction(str(divisor)) for divisor in wanted.multiples]
    if whole:
        yield from _on_grid(wanted, _common([*grid, Fraction(1)]), steps, whole=True)
    elif grid:
        yield from _on_grid(wanted, _common(grid), steps, whole=False)
    else:
        seen: set[float] = set()
        for digits in range(1, _DIGITS + 1):
            for value in _on_grid(wanted, Fraction(1, 10**digits), steps, whole=False):
                if value not in seen:
                    seen.add(value)
                    yield value
        yield from _between(wanted)


def _common(steps: list[Fraction]) -> Fraction:
    """Return the least common multiple."""
    common = steps[0]
    for step in steps[1:]:
        common = Fraction(
            math.lcm(common.numerator * step.denominator, step.numerator * common.denominator),
            common.denominator * step.denominator,
        )
    return common


def _on_grid(wanted: Constraints, step: Fraction, steps: Steps, *, whole: bool) -> Iterator[float]:
    # One more at both ends: a float such as 0.07 is not exactly its decimal.
    first = None if wanted.low is None else math.ceil(wanted.low.value / step) - 1
    last = None if wanted.high is None else math.floor(wanted.high.value / step) + 1
    misses = 0
    for place in _outward(first, last):
        steps.take()
        exact = place * step
        value = _as_number(exact)
        if (exact.denominator == 1) == whole and is_within(wanted, value):
            misses = 0
            yield value
        else:
            misses += 1
            if misses > _MAX_MISSES:
                return


def _as_number(exact: Fraction) -> float:
    if exact.denominator == 1:
        return exact.numerator
    try:
        return float(exact)
    except OverflowError:
        return math.inf


def is_within(wanted: Constraints, value: float) -> bool:
    """Return whether a number is within the bounds, and a multiple as validators see it."""
    if not math.isfinite(value):
        return False
    low, high = wanted.low, wanted.high
    if low is not None and (value < low.value or (low.is_open and value == low.value)):
        return False
    if high is not None and (value > high.value or (high.is_open and value == high.value)):
        return False
    return all(is_multiple(value, divisor) for divisor in wanted.multiples)


def _outward(first: int | None, last: int | None) -> Iterator[int]:
    """Yield the integers from `first` to `last`, from the one nearest to zero in both directions."""
    if first is not None and last is not None and first > last:
        return
    start = max(0 if last is None else min(0, last), first if first is not None else -math.inf)
    middle = int(start)
    yield middle
    for distance in count(1):
        above, below = middle + distance, middle - distance
        is_above, is_below = last is None or above <= last, first is None or below >= first
        if not is_above and not is_below:
            return
        if is_above:
            yield above
        if is_below:
            yield below


def _between(wanted: Constraints) -> Iterator[float]:
    """Yield the floats at both ends of a range that is too narrow for short decimals."""
    ends = [(bound, way) for bound, way in ((wanted.low, math.inf), (wanted.high, -math.inf)) if bound]
    for bound, way in ends:
        value = _as_number(bound.value)
        for _ in range(4):
            if math.isfinite(value) and not float(value).is_integer() and is_within(wanted, value):
                yield float(value)
            value = math.nextafter(value, way)

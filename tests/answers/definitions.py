"""Distributions and ratios, from their definitions in docs/metrics.md; no code of the product."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Difference = tuple[str, object, object]
"""A figure's name, what the product said, and what the audit computed."""

PERCENTILES = (50, 75, 90, 95, 99)


def differs(said: Any, expected: Any) -> bool:
    """Return whether two figures differ by more than rounding; null is a mean over no values."""
    if expected is None or said is None:
        return said is not expected
    if isinstance(expected, float) or isinstance(said, float):
        return not math.isclose(said, expected, rel_tol=1e-9, abs_tol=1e-9)
    return bool(said != expected)


def compare(figures: Iterable[Difference]) -> Iterator[Difference]:
    """Keep the figures that differ."""
    return (figure for figure in figures if differs(figure[1], figure[2]))


def ratio(part: float, whole: float) -> float | None:
    """Divide; null where the whole is 0."""
    return part / whole if whole else None


def distribution(values: Sequence[float]) -> dict[str, float | int | None]:
    """Describe values as the report does: nearest rank, and the deviation of the population."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return {"count": 0} | dict.fromkeys(["mean", "min", "max", "std", *(f"p{p}" for p in PERCENTILES)])
    mean = math.fsum(ordered) / count
    described: dict[str, float | int | None] = {
        "count": count,
        "mean": mean,
        "min": ordered[0],
        "max": ordered[-1],
        "std": math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / count),
    }
    return described | {f"p{p}": ordered[math.ceil(p * count / 100) - 1] for p in PERCENTILES}

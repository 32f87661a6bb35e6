"""Distributions of lengths and times, truncated: a sample out of bounds is sampled again, not clamped."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.workload.columns import Int64Column

_MAX_ROUNDS = 1_000


class Fixed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="fixed"):
    """A constant."""

    value: float

    def __post_init__(self) -> None:
        _check_number("value", self.value)


class Normal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="normal"):
    """Normal, truncated to [min, max]; a missing `min` is the least valid value of the field.

    `mean` and `std` are those before truncation.
    """

    mean: float
    std: float
    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        _check_bounds(self)


class LogNormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"):
    """Lognormal, given by the mean and standard deviation of the value itself (not of its logarithm).

    Truncated like `Normal`.
    """

    mean: float
    std: float
    min: float | None = None
    max: float | None = None

    def __post_init__(self) -> None:
        _check_bounds(self)
        if self.mean <= 0:
            raise ConfigError(f"mean of a lognormal must be above 0, got {self.mean}")


Distribution = Fixed | Normal | LogNormal


def check_distribution(field: str, distribution: Distribution, least: int, *, whole: bool) -> None:
    """Raise ConfigError unless the distribution can yield (whole) values of at least `least`."""
    if isinstance(distribution, Fixed):
        if distribution.value < least or (whole and distribution.value != int(distribution.value)):
            kind = "a whole number" if whole else "a number"
            raise ConfigError(f"{field} must be {kind} of at least {least}, got {distribution.value}")
    elif distribution.min is not None and distribution.min < least:
        raise ConfigError(f"{field}: min must be at least {least}, got {distribution.min}")
    elif distribution.max is not None and distribution.max < least:
        raise ConfigError(f"{field}: max must be at least {least}, got {distribution.max}")


def draw_whole(
    field: str, distribution: Distribution, count: int, rng: np.random.Generator, least: int
) -> Int64Column:
    """Sample `count` whole numbers; resample values that round to outside the bounds."""
    return _draw(field, distribution, count, rng, least, whole=True).astype(np.int64)


def draw(
    field: str, distribution: Distribution, count: int, rng: np.random.Generator, least: int
) -> NDArray[np.float64]:
    """Sample `count` values within the bounds.

    Errors: ConfigError if 1,000 rounds of resampling leave values out of bounds.
    """
    return _draw(field, distribution, count, rng, least, whole=False)


def _draw(
    field: str, distribution: Distribution, count: int, rng: np.random.Generator, least: int, *, whole: bool
) -> NDArray[np.float64]:
    check_distribution(field, distribution, least, whole=whole)
    if isinstance(distribution, Fixed):
        return np.full(count, float(distribution.value))
    low = least if distribution.min is None else distribution.min
    high = math.inf if distribution.max is None else distribution.max
    values = np.empty(count)
    missing = np.arange(count)
    for _ in range(_MAX_ROUNDS):
        drawn = _sample(distribution, len(missing), rng)
        if whole:
            drawn = np.rint(drawn)
        good = (drawn >= low) & (drawn <= high) & (drawn < 2**53)
        values[missing[good]] = drawn[good]
        missing = missing[~good]
        if not len(missing):
            return values
    raise ConfigError(f"{field}: {distribution} rarely falls into [{low}, {high}]; widen the bounds")


def _sample(distribution: Normal | LogNormal, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    if isinstance(distribution, Normal):
        return rng.normal(distribution.mean, distribution.std, count)
    variance = math.log1p((distribution.std / distribution.mean) ** 2)
    return rng.lognormal(math.log(distribution.mean) - variance / 2, math.sqrt(variance), count)


def _check_bounds(distribution: Normal | LogNormal) -> None:
    for name in ("mean", "std", "min", "max"):
        value = getattr(distribution, name)
        if value is not None:
            _check_number(name, value)
    if distribution.std < 0:
        raise ConfigError(f"std must be at least 0, got {distribution.std}")
    if distribution.min is not None and distribution.max is not None and distribution.min > distribution.max:
        raise ConfigError(f"min {distribution.min} is above max {distribution.max}")


def _check_number(field: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{field} must be a finite number, got {value!r}")

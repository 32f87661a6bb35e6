from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.report.statistics import Statistics, nearest_rank

GAPS = st.dictionaries(st.integers(0, 10**12), st.integers(1, 50), min_size=1, max_size=40)
STATISTICS = ("min", "max", "p50", "p75", "p90", "p95", "p99")


def of(*values: float) -> Statistics:
    return Statistics.of(np.array(values, np.float64))


def test_percentiles_are_the_nearest_rank_from_above() -> None:
    values = of(*range(1, 201))  # value v stands at rank v of 200
    assert (values.p50, values.p75, values.p90, values.p95, values.p99) == (100, 150, 180, 190, 198)
    few = of(40, 10, 30, 20)
    assert (few.p50, few.p75, few.p90, few.p99) == (20, 30, 40, 40)


@given(st.integers(1, 100), st.integers(1, 10**7))
def test_a_rank_covers_its_share_of_the_values_and_the_one_below_does_not(p: int, count: int) -> None:
    index = nearest_rank(p, count)
    assert Fraction(index + 1, count) >= Fraction(p, 100)
    assert Fraction(index, count) < Fraction(p, 100)


def test_std_is_the_populations() -> None:
    assert of(2, 4, 4, 4, 5, 5, 7, 9).std == 2
    assert of(2, 4, 4, 4, 5, 5, 7, 9).mean == 5


@given(st.floats(0, 1e9), st.integers(1, 1000))
def test_equal_values_have_their_value_as_mean_and_no_deviation(value: float, count: int) -> None:
    got = Statistics.of(np.full(count, value))
    assert (got.mean, got.std, got.min, got.max, got.count) == (value, 0, value, value, count)


@given(GAPS)
def test_weighted_values_equal_the_expanded_ones(gaps: dict[int, int]) -> None:
    values = np.array(sorted(gaps), np.float64)
    counts = np.array([gaps[gap] for gap in sorted(gaps)], np.int64)
    weighted = Statistics.of(values, counts)
    expanded = Statistics.of(np.repeat(values, counts))
    assert weighted.count == expanded.count
    for name in STATISTICS:
        assert getattr(weighted, name) == getattr(expanded, name), name
    assert weighted.mean == pytest.approx(expanded.mean, rel=1e-12, abs=1e-9)
    assert weighted.std == pytest.approx(expanded.std, rel=1e-9, abs=1e-6)


def test_nothing_has_no_statistics() -> None:
    nothing = Statistics.of(np.empty(0))
    assert nothing.count == 0
    assert all(math.isnan(getattr(nothing, name)) for name in (*STATISTICS, "mean", "std"))
    assert Statistics.of(np.empty(0), np.empty(0, np.int64)).count == 0

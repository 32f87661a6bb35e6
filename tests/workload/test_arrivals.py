from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from understudy.errors import ConfigError
from understudy.workload import ArrivalProcess, Burst, ClosedLoop, Constant, Gamma, OpenLoop, Poisson
from understudy.workload.arrivals import arrival_times_ns


def times_ms(process: ArrivalProcess, sessions: int, seed: int = 42) -> Any:
    return arrival_times_ns(process, sessions, np.random.default_rng(seed)) / 1e6


def test_a_burst_arrives_at_once() -> None:
    assert times_ms(Burst(), 3).tolist() == [0, 0, 0]


def test_constant_10_qps_is_every_100_ms() -> None:
    assert times_ms(Constant(10), 4).tolist() == [0, 100, 200, 300]


def test_constant_gaps_do_not_drift() -> None:
    assert arrival_times_ns(Constant(3), 3_000_001, np.random.default_rng())[-1] == 10**15


def test_poisson_10_qps_has_mean_and_deviation_of_100_ms() -> None:
    gaps = np.diff(times_ms(Poisson(10), 100_000))
    assert gaps.mean() == pytest.approx(100, rel=0.02)
    assert gaps.std() == pytest.approx(100, rel=0.02)


def test_gamma_20_qps_of_shape_4_has_mean_50_and_deviation_25_ms() -> None:
    gaps = np.diff(times_ms(Gamma(20, burstiness=4), 100_000))
    assert gaps.mean() == pytest.approx(50, rel=0.02)
    assert gaps.std() == pytest.approx(25, rel=0.02)


@pytest.mark.parametrize("process", [Poisson(10), Gamma(10, 0.5)])
def test_the_same_seed_gives_the_same_arrivals(process: ArrivalProcess) -> None:
    assert times_ms(process, 50).tolist() == times_ms(process, 50).tolist()
    assert times_ms(process, 50).tolist() != times_ms(process, 50, seed=43).tolist()


@pytest.mark.parametrize("process", [Burst(), Constant(10), Poisson(10), Gamma(10, 2)])
def test_arrivals_begin_at_zero_and_never_fall(process: ArrivalProcess) -> None:
    for sessions in (0, 1, 100):
        times = times_ms(process, sessions)
        assert len(times) == sessions
        assert times[:1].tolist() == [0] * min(sessions, 1)
        assert (np.diff(times) >= 0).all()


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "10"])
def test_a_rate_must_be_finite_and_positive(value: Any) -> None:
    for make in (Constant, Poisson, lambda qps: Gamma(qps, 1)):
        with pytest.raises(ConfigError, match=r"qps must be a (finite number above 0|number), got"):
            make(value)
    with pytest.raises(ConfigError, match=r"burstiness must be a (finite number above 0|number), got"):
        Gamma(1, value)
    with pytest.raises(
        ConfigError, match=r"arrival_rate_scale must be a (finite number above 0|number), got"
    ):
        OpenLoop(arrival_rate_scale=value)


def test_arrivals_past_64_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match="qps 1e-10 puts the last of 3 sessions past"):
        times_ms(Constant(1e-10), 3)


def test_loops_are_plain_values() -> None:
    assert OpenLoop() == OpenLoop(arrival_rate_scale=1.0)
    assert {ClosedLoop(concurrency=4), ClosedLoop(concurrency=4)} == {ClosedLoop(4)}
    with pytest.raises(AttributeError):
        ClosedLoop(4).concurrency = 5  # type: ignore[misc]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_concurrency_must_be_a_positive_integer(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"concurrency must be (at least 1|a whole number)"):
        ClosedLoop(concurrency=value)

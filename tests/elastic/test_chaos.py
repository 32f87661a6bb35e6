"""Random fleets under random faults: no request is lost or answered twice, blocks are conserved, indexes agree."""

from __future__ import annotations

import os

import pytest

from elastic.random_faults import check_case, random_case
from understudy.errors import ConfigError
from understudy.run.chaos import draw_faults

SOAK_CASES = int(os.environ.get("SOAK_FAULT_PLANS", "1000"))


@pytest.mark.parametrize("seed", range(30))
def test_no_invariant_breaks_under_random_faults(seed: int) -> None:
    check_case(random_case(seed))


@pytest.mark.parametrize("seed", range(100, 108))
def test_two_runs_of_a_fault_plan_have_one_digest_with_and_without_fast_forward(seed: int) -> None:
    case = random_case(seed, most_requests=25)
    first = check_case(case)
    assert check_case(case, check="deep").facts.digest == first.facts.digest
    assert check_case(case, fast_forward=False).facts.digest == first.facts.digest


@pytest.mark.soak
def test_many_random_fault_plans() -> None:
    """As many as SOAK_FAULT_PLANS says."""
    for seed in range(1000, 1000 + SOAK_CASES):
        try:
            digest = check_case(random_case(seed)).facts.digest
            assert digest == check_case(random_case(seed)).facts.digest
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_a_plan_is_drawn_by_its_seed_alone() -> None:
    given = {"per_hour": 3600.0, "end_s": 20.0, "workers": 3}
    assert draw_faults(5, **given) == draw_faults(5, **given)  # type: ignore[arg-type]
    assert draw_faults(5, **given) != draw_faults(6, **given)  # type: ignore[arg-type]
    assert 5 < len(draw_faults(5, **given)) < 50  # type: ignore[arg-type]
    assert all(one.duration_s and one.worker is not None for one in draw_faults(5, **given))  # type: ignore[arg-type]


def test_a_rate_that_draws_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="chaos_rate: 0 must be above 0"):
        draw_faults(1, per_hour=0, end_s=10, workers=2)

"""The engine with tiers against the slow model: random workloads with cancels and prefetches, move by move."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tiers.random_play import play_random

SOAK = int(os.environ.get("UNDERSTUDY_SOAK_OPS", "0"))


@pytest.mark.parametrize("part", range(4))
def test_random_workloads_go_as_the_model_says(part: int) -> None:
    happened: Counter[str] = Counter()
    for seed in range(9 * part, 9 * part + 9):
        happened += Counter(play_random(seed))
    for what in (
        "told",
        "parked",
        "held",
        "slept",
        "preempted",
        "onboarded",
        "offloaded",
        "dropped",
        "slow_loads",
    ):
        assert happened[what], what


@pytest.mark.soak
@pytest.mark.skipif(SOAK <= 0, reason="set UNDERSTUDY_SOAK_OPS to a number of operations")
def test_thousands_of_workloads_go_as_the_model_says() -> None:
    for seed in range(1000, 1000 + SOAK // 100):
        play_random(seed)

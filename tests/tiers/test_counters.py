"""What the counters of tiers count, by numbers."""

from __future__ import annotations

import pytest

from tiers.building import INF, Worker, tiers
from tiers.fleets import crowd_of, play


@pytest.mark.parametrize(("gbps", "waits"), [(1.0, 1), (INF, 0)])
def test_only_allocations_that_had_to_wait_are_waits_for_room(gbps: float, waits: int) -> None:
    """A copy that leaves in no time makes nobody wait."""
    worker = Worker(1, tiers(gbps=gbps))
    worker.cache(1, 1)
    worker.cache(2, 1)
    totals = worker.engine.tier_totals
    assert (totals.offloaded_blocks, totals.room_waits) == (1, waits)


def test_a_request_that_waits_for_a_copy_of_anothers_waits_too() -> None:
    worker = Worker(2, tiers())
    worker.cache(1, 2)
    worker.submit(2, 4)
    worker.submit(3, 4)
    worker.play()
    assert worker.engine.tier_totals.room_waits == 2


@pytest.mark.parametrize("rate", [0.0, 0.5, 1.0])
def test_how_long_loads_took_has_failed_ones_too(rate: float) -> None:
    result = play(crowd_of(1, requests=160), tiers(write_through=True, onboard_failure_rate=rate))
    totals = result.tier_totals
    assert totals.onboards > 8
    assert (totals.failed_loads > 0) == (rate > 0)
    assert len(result.onboard_ns) == totals.onboards
    assert result.onboard_ns.min() > 0

"""A live fleet under load: objects stay as many, nothing is lost, blocks return, events have no gap."""

from __future__ import annotations

import os

import pytest

from live_soak import lost, run_soak

SECONDS = float(os.environ.get("UNDERSTUDY_LIVE_SOAK_S", "600"))
WORKERS = int(os.environ.get("UNDERSTUDY_LIVE_SOAK_WORKERS", "100"))
TOKENS_PER_S = float(os.environ.get("UNDERSTUDY_LIVE_SOAK_RATE", "8000"))


def test_requests_that_came_and_went_leave_no_object_behind() -> None:
    soak = run_soak(workers=3, stretches_s=[1.0, 0.8, 0.8], tokens_per_s=3000, routing="kv")
    assert not lost(soak)
    assert soak.clients["completed"] > 50
    assert soak.clients["cancelled"] > 0
    assert soak.growth() == {}


@pytest.mark.soak
def test_a_fleet_under_load_has_as_many_objects_at_minute_ten_as_at_minute_five() -> None:
    halves = [SECONDS / 10, SECONDS / 2, SECONDS / 2]
    soak = run_soak(workers=WORKERS, stretches_s=halves, tokens_per_s=TOKENS_PER_S)
    assert not lost(soak)
    assert soak.growth() == {}
    assert soak.counts[-1].resident_mb < soak.counts[-2].resident_mb * 1.02 + 2

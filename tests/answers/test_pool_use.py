"""Pools of prefill and decode workers are busy, and have running requests, as the events of the run say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from answers.definitions import compare
from answers.evidence import replay
from answers.hand_offs_audit import every_hand_off_is_counted_once, pools_are_busy_as_their_steps
from answers.random_cases import random_case

if TYPE_CHECKING:
    from pathlib import Path

FAILED_READS, ABORTED, PREEMPTED = 25, 44, 31
"""Seeds of fleets of which requests lose their blocks on the way, are aborted, or make room for others."""


@pytest.mark.parametrize("seed", [FAILED_READS, 41, ABORTED, PREEMPTED])
def test_a_worker_is_busy_only_while_a_request_runs_on_it(seed: int, tmp_path: Path) -> None:
    found = replay(random_case(seed, "hand_offs"), tmp_path, every_output=True)
    for audit in (pools_are_busy_as_their_steps, every_hand_off_is_counted_once):
        assert list(compare(audit(found))) == []
    statuses = {line["status"] for line in found.lines}
    assert ("failed" in statuses) == (seed == FAILED_READS)
    assert ("cancelled" in statuses) == (seed in (41, ABORTED))
    assert (found.report["preemptions"] > 0) == (seed in (FAILED_READS, PREEMPTED))

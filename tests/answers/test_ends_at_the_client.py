"""A client sees each end of a request, also a refusal or an abort, after the time between engine and client."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

from answers.definitions import compare
from answers.evidence import ns, replay
from answers.random_cases import Case
from answers.requests_audit import arrivals_follow_the_trace, every_request_ends_once
from answers.steps_audit import waterfalls_add_up

if TYPE_CHECKING:
    from pathlib import Path

    from answers.evidence import Evidence

FLAGS = {"trace-block-size": "16", "model": "Llama-3.1-8B", "gpu": "H100", "max-model-len": "500"}


def run(folder: Path, first: dict[str, Any], **more: str) -> Evidence:
    """Replay a session of two turns, and a request that is served meanwhile."""
    row = {"input_length": 80, "output_length": 4, "hash_ids": [*range(5)]}
    rows = (
        {**row, "session_id": "s", "timestamp": 0.0, **first},
        {**row, "session_id": "s", "delay": 10.0},
        {**row, "session_id": "t", "timestamp": 1.0},
    )
    return replay(Case(0, "models", rows, {**FLAGS, **more}), folder, every_output=True)


REFUSED = {"input_length": 600, "hash_ids": [*range(38)]}
ABORTED = {"abort_after_ms": 0.0}


@pytest.mark.parametrize(
    ("first", "status"), [(REFUSED, "rejected"), (ABORTED, "cancelled"), ({}, "completed")]
)
def test_the_next_turn_comes_a_delay_after_the_end_that_the_client_sees(
    first: dict[str, Any], status: str, tmp_path: Path
) -> None:
    found = run(tmp_path, first)
    ended, following, _ = found.lines
    assert ended["status"] == status
    front_end_ns = round(found.report["run"]["times"]["front_end_ms"] * 1e6)
    assert front_end_ns > 1e6
    assert ns(following["arrival_ms"]) == ns(ended["finish_ms"] + 10)
    if status != "completed":  # the engine ended it as it arrived
        assert (ended["first_admit_ms"], ns(ended["finish_ms"])) == (None, front_end_ns)
    for audit in (every_request_ends_once, arrivals_follow_the_trace, waterfalls_add_up):
        assert list(compare(audit(found))) == []


def test_the_next_session_of_a_closed_loop_waits_for_a_refusal_too(tmp_path: Path) -> None:
    found = run(tmp_path, REFUSED, concurrency="1")
    lines = found.lines
    assert ns(lines[2]["arrival_ms"]) == ns(lines[1]["finish_ms"])
    assert math.isclose(lines[0]["finish_ms"], found.report["run"]["times"]["front_end_ms"])

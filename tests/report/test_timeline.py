from __future__ import annotations

from typing import Any

import pytest

from report.building import MS, Row, timeline
from understudy.errors import InvalidArgument
from understudy.run.timeline import Status
from understudy.workload.columns import RowError


def test_columns_are_read_only_and_keep_their_dtypes() -> None:
    t = timeline(Row([10, 20]), Row([15]))
    dtypes = [
        str(values.dtype) for values in (t.arrival_ns, t.prompt_tokens, t.cached_tokens_total, t.status)
    ]
    assert dtypes == ["int64", "int32", "int64", "uint8"]
    assert len(t) == 2
    with pytest.raises(ValueError, match="read-only"):
        t.arrival_ns[0] = 1


def test_a_run_lasts_from_the_first_arrival_to_the_last_token_of_anybody() -> None:
    t = timeline(
        Row([30], arrival_ms=20),
        Row([50, 90], arrival_ms=25, admit_ms=25, status=Status.CANCELLED, finish_ms=95),
    )
    assert (t.start_ns, t.end_ns) == (20 * MS, 90 * MS)


def test_a_run_without_tokens_lasts_to_its_last_completion() -> None:
    t = timeline(Row(arrival_ms=5, finish_ms=8), Row(arrival_ms=6, finish_ms=70, status=Status.REJECTED))
    assert (t.start_ns, t.end_ns) == (5 * MS, 8 * MS)


def test_a_run_without_requests_is_empty() -> None:
    t = timeline()
    assert (len(t), t.start_ns, t.end_ns) == (0, 0, 0)


def test_a_turn_that_never_arrived_does_not_start_the_run() -> None:
    t = timeline(Row([30], arrival_ms=20), Row(status=Status.UNFINISHED), arrival_ns=[20 * MS, -1])
    assert t.start_ns == 20 * MS


ONE = Row([10, 20], arrival_ms=1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"worker": [0, 0]}, "worker must have 1 entries"),
        ({"prompt_tokens": [1.5]}, "prompt_tokens must contain integers"),
        ({"status": [5]}, r"status\[0\] must be one of 0 to 4"),
        ({"worker": [1]}, r"worker\[0\] is not a worker"),
        ({"prompt_tokens": [-1]}, r"prompt_tokens\[0\] must not be negative"),
        ({"first_admit_ns": [0]}, r"first_admit_ns\[0\] comes before"),
        ({"finish_ns": [19 * MS]}, r"finish_ns\[0\] comes before"),
        ({"finish_ns": [-1]}, r"finish_ns\[0\] of a terminal request"),
        ({"finish_ns": [-2]}, r"finish_ns\[0\] must be −1"),
        ({"status": [3]}, r"finish_ns\[0\] of an unfinished"),
        ({"arrival_ns": [-1]}, r"arrival_ns\[0\] of a completed"),
        ({"second_token_ns": [-1]}, r"second_token_ns\[0\] does not agree"),
        ({"output_tokens": [1]}, r"second_token_ns\[0\] does not agree"),
        ({"first_admit_ns": [-1]}, r"first_admit_ns\[0\] of a request with tokens"),
        ({"queued_ns": [-1]}, r"queued_ns\[0\] of a request that was admitted"),
        ({"cached_tokens_first": [11]}, r"cached_tokens_first\[0\] is above"),
        ({"cached_tokens_first": [5]}, r"cached_tokens_total\[0\] is below"),
        ({"itl_ns": [-1], "itl_count": [1]}, r"itl_ns\[0\] must not be negative"),
        ({"itl_ns": [5, 5], "itl_count": [1, 1]}, r"itl_ns\[1\] must ascend"),
        ({"itl_count": [0]}, r"itl_count\[0\] must be at least 1"),
        ({"itl_count": [2]}, "adds up to 2, but completed requests have 1 gaps"),
        ({"itl_ns": [11 * MS]}, "is not the time from first to last"),
        ({"num_workers": 0}, "num_workers must be an integer of at least 1"),
        ({"steps": -1}, "steps must be an integer of at least 0"),
        ({"reject_reasons": {0: "too long"}}, "row 0, which was not rejected"),
        ({"reject_reasons": {7: "too long"}}, "row 7, which was not rejected"),
    ],
)
def test_an_inconsistent_timeline_is_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        timeline(ONE, **overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"sample_worker": [3]}, "is not a worker"),
        ({"sample_time_ns": [-1]}, "must not be negative"),
        ({"sample_waiting": [-1]}, "must not be negative"),
        ({"sample_cached_blocks": [41]}, "are more than blocks_per_worker"),
    ],
)
def test_an_impossible_sample_is_refused_by_name(overrides: dict[str, Any], message: str) -> None:
    sample: dict[str, Any] = {
        "sample_time_ns": [0],
        "sample_worker": [0],
        "sample_running": [1],
        "sample_waiting": [0],
        "sample_used_blocks": [60],
        "sample_cached_blocks": [40],
    }
    timeline(ONE, **sample)
    with pytest.raises(RowError, match=message):
        timeline(ONE, **{**sample, **overrides})

"""Sessions, delays and the optional columns of a Mooncake trace."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from understudy.errors import InvalidArgument
from workload.building import read, row

if TYPE_CHECKING:
    from pathlib import Path


def test_rows_with_a_session_id_are_turns_in_file_order(tmp_path: Path) -> None:
    w = read(
        tmp_path,
        row(timestamp=10, session_id="a"),
        row(timestamp=11),
        row(timestamp=..., session_id="a", delay=5),
        row(timestamp=12, session_id="b"),
        row(timestamp=..., session_id="a"),
    )
    assert w.session.tolist() == [0, 1, 0, 2, 0]
    assert w.turn.tolist() == [0, 0, 1, 0, 2]
    assert w.session_ids == ["a", "request_2", "b"]
    assert w.delay_ns.tolist() == [0, 0, 5_000_000, 0, 0]
    assert w.arrival_ns.tolist() == [10_000_000, 11_000_000, 10_000_000, 12_000_000, 10_000_000]


def test_a_delay_is_explicit_else_the_timestamp_difference_else_zero(tmp_path: Path) -> None:
    w = read(
        tmp_path,
        row(timestamp=100, session_id="a"),
        row(timestamp=130, session_id="a"),
        row(timestamp=190.5, session_id="a", delay=7),
        row(timestamp=200, session_id="a"),
        row(timestamp=..., session_id="a"),
    )
    assert (w.delay_ns / 1e6).tolist() == [0, 30, 7, 9.5, 0]


def test_a_later_turn_may_not_go_back_in_time(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:3: timestamp is earlier .* in line 1"):
        read(tmp_path, row(timestamp=5, session_id="a"), row(), row(timestamp=4, session_id="a"))


def test_a_timestamp_that_gives_no_delay_is_not_ignored(tmp_path: Path) -> None:
    rows = row(timestamp=..., session_id="a"), row(timestamp=4, session_id="a")
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:2: timestamp gives no delay"):
        read(tmp_path, *rows)


def test_a_first_turn_with_a_zero_delay_is_fine(tmp_path: Path) -> None:
    assert read(tmp_path, row(delay=0)).delay_ns.tolist() == [0]


def test_a_trace_without_timestamps_has_no_arrivals(tmp_path: Path) -> None:
    w = read(
        tmp_path, row(timestamp=...), row(timestamp=None, session_id="a"), row(timestamp=..., session_id="a")
    )
    assert not w.has_arrivals
    assert w.arrival_ns.tolist() == [0, 0, 0]


def test_a_session_called_like_a_nameless_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:2: .*'request_2' is taken"):
        read(tmp_path, row(session_id="request_2"), row())


def test_request_ids_are_kept_and_must_be_unique(tmp_path: Path) -> None:
    assert read(tmp_path, row(request_id="x"), row()).request_ids == ["x", "request_2"]
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:4: request_id 'x' was already used in line 1"):
        read(tmp_path, row(request_id="x"), "", row(), row(request_id="x"))


def test_priorities_and_policy_classes_are_kept(tmp_path: Path) -> None:
    w = read(
        tmp_path,
        row(priority=-2, strict_priority=2**32 - 1),
        row(policy_class="gold"),
        row(policy_class="tin", priority=5),
        row(policy_class="gold"),
    )
    assert w.priority.tolist() == [-2, 0, 5, 0]
    assert w.strict_priority.tolist() == [2**32 - 1, 0, 0, 0]
    assert w.policy_classes == ("gold", "tin")
    assert w.policy_class.tolist() == [-1, 0, 1, 0]


def test_exact_output_tokens_are_kept_where_given(tmp_path: Path) -> None:
    w = read(tmp_path, row(), row(output_token_ids=[7, 8, 2**32 - 1]), row(output_token_ids=None))
    assert w.output_token_offsets.tolist() == [0, 0, 3, 3]
    assert w.output_token_ids.tolist() == [7, 8, 2**32 - 1]
    assert w.output_token_ids.dtype == np.uint32


def test_an_output_may_recur_in_the_next_turn(tmp_path: Path) -> None:
    first = row(session_id="s", output_length=500, hash_ids=[0, 1], output_in_next_turn=True)
    w = read(tmp_path, first, row(session_id="s", timestamp=..., input_length=1200, hash_ids=[0, 1, 2]))
    assert w.output_in_next.tolist() == [True, False]
    assert w.known_output_tokens(0).tolist() == [1] * 424 + [2] * 76
    with pytest.raises(
        InvalidArgument, match=r"trace\.jsonl:1: output_in_next_turn needs a next prompt of at least 1100"
    ):
        read(tmp_path, first, row(session_id="s", timestamp=..., input_length=1030, hash_ids=[0, 1, 2]))

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from understudy.errors import ConfigError, InvalidArgument
from understudy.workload import RowError
from workload.building import assert_same, workload


def two_sessions(**columns: Any) -> Any:
    """Sessions a (rows 0, 2) and b (row 1)."""
    return workload(
        [4, 4, 12],
        **{
            "session": [0, 1, 0],
            "turn": [0, 0, 1],
            "arrival_ns": [5, 7, 5],
            "delay_ns": [0, 0, 9],
            "hash_ids": [0, 1, 0, 2, 3],
        }
        | columns,
    )


def test_a_workload_without_sessions_gives_each_request_its_own() -> None:
    w = workload([4, 8, 5])
    assert len(w) == w.sessions == 3
    assert w.session.tolist() == [0, 1, 2]
    assert w.turn.tolist() == w.delay_ns.tolist() == w.priority.tolist() == [0, 0, 0]
    assert w.next_turn.tolist() == [-1, -1, -1]


def test_totals_count_tokens() -> None:
    w = workload([4, 8, 5], output_tokens=[1, 0, 2])
    assert (w.total_prompt_tokens, w.total_output_tokens) == (17, 3)


def test_totals_do_not_overflow_32_bits() -> None:
    w = workload([4, 4], output_tokens=[2**31 - 1, 2**31 - 1])
    assert w.total_output_tokens == 2**32 - 2


def test_an_empty_workload_is_a_workload() -> None:
    w = workload([])
    assert (len(w), w.sessions, w.total_prompt_tokens, w.token_space) == (0, 0, 0, 0)
    assert len(w.normalised().scale_arrival_rate(2).sorted_by_arrival().head(5)) == 0


def test_columns_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        workload().arrival_ns[0] = 1


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt_tokens": [4, 8]}, "prompt_tokens must have 3 entries, got 2"),
        ({"prompt_tokens": [[4, 8, 5]]}, "prompt_tokens must be one-dimensional"),
        ({"prompt_tokens": [4.0, 8.0, 5.0]}, "prompt_tokens must contain integers, got float64"),
        ({"prompt_tokens": [4, 0, 5]}, r"prompt_tokens\[1\] must be at least 1, got 0"),
        ({"output_tokens": [4, 0, -5]}, r"output_tokens\[2\] must be at least 0, got -5"),
        ({"output_tokens": [2**31, 1, 1]}, r"output_tokens\[0\] must fit int32, got 2147483648"),
        ({"arrival_ns": [0, -1, 0]}, r"arrival_ns\[1\] must be at least 0"),
        ({"hash_offsets": [0, 1, 3]}, "hash_offsets must have 4 entries, got 3"),
        ({"hash_offsets": [1, 1, 3, 5]}, r"hash_offsets\[0\] must be 0"),
        ({"hash_offsets": [0, 3, 1, 5]}, r"hash_offsets\[2\] must not be below"),
        ({"hash_offsets": [0, 1, 3, 4]}, r"hash_offsets\[3\] must equal the number of values, 5, got 4"),
        (
            {"hash_offsets": [0, 2, 3, 5]},
            r"hash_ids\[0\] must have 1 ids for a prompt of 4 tokens in blocks of 4",
        ),
        ({"hash_ids": [0, 1, 2, 3, -4]}, r"hash_ids\[4\] must fit uint32"),
        ({"trace_block_size": 0}, "trace_block_size must be at least 1, got 0"),
        ({"trace_block_size": 4.0}, "trace_block_size must be an integer, got 4.0"),
        ({"delay_ns": [0, 5, 0]}, r"delay_ns\[1\] must be 0 for a first turn, got 5"),
        ({"has_arrivals": False}, r"arrival_ns\[1\] must be 0 without arrivals, got 1000"),
        ({"session": [0, 2, 1]}, r"session\[1\] must be 1, the next new session, got 2"),
        ({"request_ids": ["a", "b"]}, "request_ids must have 3 entries, got 2"),
        ({"request_ids": ["a", "b", "a"]}, r"request_ids\[2\] 'a' was already used by row 0"),
        ({"session_ids": ["a", "b", "c", "d"]}, "session_ids must have 3 entries, got 4"),
        ({"output_token_ids": [1]}, "output_token_offsets and output_token_ids need each other"),
        (
            {"output_token_ids": [1, 2], "output_token_offsets": [0, 0, 2, 2]},
            r"output_token_ids\[1\] must have one entry per output token, 3, got 2",
        ),
        ({"output_in_next": [1, 0, 0]}, "output_in_next must contain booleans"),
        ({"abort_after_ns": [0, -2, 0]}, r"abort_after_ns\[1\] must be at least 0, or −1 for none, got -2"),
        ({"strict_priority": [0, 0, 2**32]}, r"strict_priority\[2\] must lie in"),
        ({"policy_class": [0, 0, 0]}, "policy_class and policy_classes need each other"),
        (
            {"policy_class": [0, -2, 0], "policy_classes": ("a",)},
            r"policy_class\[1\] must be −1 or an index below 1",
        ),
    ],
)
def test_a_bad_column_is_named_with_its_row(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        workload([4, 8, 5], **columns)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"turn": [0, 0, 2]}, r"turn\[2\] must be 1, counting the rows of session 0, got 2"),
        ({"turn": [1, 0, 0]}, r"session\[1\] must be 0, the next new session, got 1"),
        ({"session": [0, 1, 1]}, r"arrival_ns\[2\] must be that of its session's first turn, 7, got 5"),
        ({"session": [0, 1, 2]}, r"session\[2\] must be one of the 2 sessions that have a first turn, got 2"),
        ({"arrival_ns": [5, 7, 6]}, r"arrival_ns\[2\] must be that of its session's first turn, 5, got 6"),
        ({"output_in_next": [False, True, False]}, r"output_in_next\[1\] needs a following turn"),
        (
            {"output_in_next": [True, False, False], "output_tokens": [9, 3, 3]},
            r"output_in_next\[0\] needs a next prompt of at least 13",
        ),
        (
            {"output_in_next": [True, False, False], "hash_ids": [9, 1, 0, 2, 3]},
            r"output_in_next\[0\] needs a next prompt that begins",
        ),
        (
            {
                "output_in_next": [True, False, False],
                "output_token_ids": [1, 2, 3],
                "output_token_offsets": [0, 3, 3, 3],
            },
            r"output_in_next\[0\] contradicts",
        ),
    ],
)
def test_a_broken_session_is_named_with_its_row(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        two_sessions(**columns)


def test_turns_of_a_session_follow_each_other() -> None:
    w = two_sessions()
    assert w.sessions == 2
    assert w.next_turn.tolist() == [2, -1, -1]


def test_output_that_the_next_prompt_quotes_is_known() -> None:
    w = two_sessions(output_in_next=[True, False, False], output_tokens=[6, 3, 3])
    # The second prompt is blocks 0, 2, 3 of 4 tokens; the output takes its positions 4 … 9.
    quoted = w.known_output_tokens(0)
    assert quoted is not None
    assert quoted.tolist() == [2, 2, 2, 2, 3, 3]
    assert w.known_output_tokens(1) is None


def test_exact_output_tokens_are_known_where_given() -> None:
    w = workload([4, 4], output_tokens=[2, 2], output_token_ids=[7, 8], output_token_offsets=[0, 0, 2])
    assert w.known_output_tokens(0) is None
    given = w.known_output_tokens(1)
    assert given is not None
    assert given.tolist() == [7, 8]


def test_normalising_shifts_the_first_arrival_to_zero() -> None:
    w = workload([4, 4, 4], arrival_ns=[700, 500, 900]).normalised()
    assert w.arrival_ns.tolist() == [200, 0, 400]


def test_scale_arrival_rate_divides_arrivals_and_delays() -> None:
    w = two_sessions(arrival_ns=[100, 200, 100], delay_ns=[0, 0, 55]).scale_arrival_rate(10)
    assert w.arrival_ns.tolist() == [10, 20, 10]
    assert w.delay_ns.tolist() == [0, 0, 6]  # 5.5 rounds to even


def test_normalising_then_speeding_up_100_and_200_ms_by_10_gives_0_and_10_ms() -> None:
    w = workload([4, 4], arrival_ns=[100_000_000, 200_000_000]).normalised().scale_arrival_rate(10)
    assert w.arrival_ns.tolist() == [0, 10_000_000]


@pytest.mark.parametrize("ratio", [0, -1, float("nan"), float("inf")])
def test_an_arrival_rate_scale_that_is_not_finite_and_positive_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="arrival_rate_scale must be a finite number above 0"):
        workload().scale_arrival_rate(ratio)


def test_scale_arrival_rate_refuses_times_that_doubles_would_blur() -> None:
    w = workload([4, 4], arrival_ns=[2**60, 2**60 + 3])
    with pytest.raises(ConfigError, match="call normalised"):
        w.scale_arrival_rate(3)
    assert w.normalised().scale_arrival_rate(3).arrival_ns.tolist() == [0, 1]


def test_slowing_down_past_64_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="moves arrival_ns"):
        workload([4], arrival_ns=[2**50]).scale_arrival_rate(1e-9)


def test_sorting_is_stable_and_keeps_turns_in_order() -> None:
    w = workload(
        [4, 4, 12, 4],
        session=[0, 1, 0, 2],
        turn=[0, 0, 1, 0],
        arrival_ns=[50, 20, 50, 20],
        session_ids=["late", "early", "tie"],
        request_ids=["a", "b", "c", "d"],
    ).sorted_by_arrival()
    assert w.request_ids == ["b", "d", "a", "c"]
    assert w.session_ids == ["early", "tie", "late"]
    assert w.session.tolist() == [0, 1, 2, 2]
    assert w.turn.tolist() == [0, 0, 0, 1]


def test_sorting_needs_arrivals() -> None:
    with pytest.raises(InvalidArgument, match="has no arrivals"):
        workload([4], arrival_ns=[0], has_arrivals=False).sorted_by_arrival()


def test_take_keeps_content_and_names_with_their_rows() -> None:
    w = workload(
        [4, 8, 5],
        output_token_ids=[1, 2, 3, 4, 5, 6],
        output_token_offsets=[0, 3, 3, 6],
        request_ids=["a", "b", "c"],
        priority=[1, 2, 3],
        strict_priority=[4, 5, 6],
        abort_after_ns=[-1, 8, 9],
        policy_class=[0, -1, 1],
        policy_classes=("x", "y"),
    ).take([2, 0])
    assert w.prompt_tokens.tolist() == [5, 4]
    assert [w.prompt_hash_ids(row).tolist() for row in (0, 1)] == [[3, 4], [0]]
    assert [tokens.tolist() for row in (0, 1) if (tokens := w.known_output_tokens(row)) is not None] == [
        [4, 5, 6],
        [1, 2, 3],
    ]
    assert (w.request_ids, w.priority.tolist()) == (["c", "a"], [3, 1])
    assert w.strict_priority is not None
    assert w.policy_class is not None
    assert (w.strict_priority.tolist(), w.policy_class.tolist()) == ([6, 4], [1, 0])
    assert w.abort_after_ns is not None
    assert w.abort_after_ns.tolist() == [9, -1]


def test_taking_every_row_changes_nothing() -> None:
    w = two_sessions(output_in_next=[True, False, False])
    assert_same(w.take([0, 1, 2]), w)


def test_taking_a_later_turn_alone_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="session"):
        two_sessions().take([1, 2])


def test_taking_a_row_twice_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="session"):
        workload().take([1, 1])


@pytest.mark.parametrize("rows", [[3], [-1]])
def test_taking_a_row_that_is_not_there_is_refused(rows: list[int]) -> None:
    with pytest.raises(InvalidArgument, match=r"rows must lie in 0 … 2"):
        workload().take(rows)


def test_head_forgets_that_an_output_recurs_when_the_next_turn_is_cut_off() -> None:
    w = two_sessions(output_in_next=[True, False, False])
    head = w.head(2)
    assert head.output_in_next is not None
    assert head.output_in_next.tolist() == [False, False]
    assert_same(w.head(99), w)


def test_take_numbers_sessions_anew_but_not_hash_ids() -> None:
    w = workload([4, 4, 4]).take(np.array([2, 1]))
    assert w.session.tolist() == [0, 1]
    assert w.hash_ids.tolist() == [2, 1]

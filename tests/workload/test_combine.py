from __future__ import annotations

import pytest

from understudy.errors import InvalidArgument
from understudy.workload import concat, repeat
from workload.building import assert_same, workload


def test_concat_keeps_rows_in_order_and_content_apart() -> None:
    w = concat([workload([4, 8]), workload([4])])
    assert w.prompt_tokens.tolist() == [4, 8, 4]
    assert w.hash_ids.tolist() == [0, 1, 2, 3]
    assert w.session.tolist() == [0, 1, 2]
    assert [w.prompt_hash_ids(row).tolist() for row in range(3)] == [[0], [1, 2], [3]]


def test_concat_with_shared_prefixes_keeps_ids() -> None:
    w = concat([workload([4, 8]), workload([4])], shared_prefixes=True)
    assert w.hash_ids.tolist() == [0, 1, 2, 0]


def test_concat_of_one_part_is_that_part() -> None:
    part = workload(
        [4, 12],
        session=[0, 0],
        turn=[0, 1],
        arrival_ns=[0, 0],
        hash_ids=[0, 0, 1, 2],
        output_in_next=[True, False],
        strict_priority=[1, 2],
        request_ids=["a", "b"],
        policy_class=[-1, 0],
        policy_classes=("x",),
    )
    assert_same(concat([part]), part)


def test_concat_moves_exact_outputs_with_the_prompts_they_recur_in() -> None:
    part = workload(
        [4], hash_ids=[1], output_tokens=[2], output_token_ids=[1, 5], output_token_offsets=[0, 2]
    )
    w = concat([workload([4]), part, workload([]), part])
    assert w.hash_ids.tolist() == [0, 2, 8]
    assert w.output_token_ids is not None
    assert w.output_token_offsets is not None
    assert w.output_token_ids.tolist() == [2, 6, 8, 12]
    assert w.output_token_offsets.tolist() == [0, 0, 2, 4]


def test_concat_fills_what_one_part_does_not_carry() -> None:
    rich = workload([4], strict_priority=[3], abort_after_ns=[5], policy_class=[0], policy_classes=("x",))
    other = workload([4], policy_class=[1], policy_classes=("y", "x"))
    w = concat([workload([4]), rich, other])
    assert w.strict_priority is not None
    assert w.policy_class is not None
    assert w.strict_priority.tolist() == [0, 3, 0]
    assert w.abort_after_ns is not None
    assert w.abort_after_ns.tolist() == [-1, 5, -1]
    assert w.policy_classes == ("x", "y")
    assert w.policy_class.tolist() == [-1, 0, 0]


def test_concat_of_unlike_parts_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="trace_block_size is 4 in part 0 but 8 in part 1"):
        concat([workload([4]), workload([4], trace_block_size=8)])
    with pytest.raises(InvalidArgument, match="has_arrivals is True in part 0 but False in part 1"):
        concat([workload([4]), workload([4], has_arrivals=False)])
    with pytest.raises(
        InvalidArgument, match="presence of request_ids is True in part 0 but False in part 1"
    ):
        concat([workload([4], request_ids=["a"]), workload([4])])
    with pytest.raises(InvalidArgument, match="at least one"):
        concat([])


def test_concat_with_two_equal_names_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="'a' was already used by row 0"):
        concat([workload([4], request_ids=["a"]), workload([4], request_ids=["a"])])


def test_concat_that_needs_too_many_token_numbers_is_refused() -> None:
    part = workload([4], hash_ids=[2**31])
    with pytest.raises(InvalidArgument, match="more than fit 32 bits"):
        concat([part, part])


def test_repeat_plays_copies_one_after_the_other() -> None:
    w = repeat(workload([4, 4], arrival_ns=[100, 400], request_ids=["a", "b"]), 3, gap_ns=50)
    assert w.arrival_ns.tolist() == [100, 400, 450, 750, 800, 1100]
    assert w.hash_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert w.request_ids == ["a", "b", "a#1", "b#1", "a#2", "b#2"]


def test_repeat_with_shared_prefixes_meets_the_same_content() -> None:
    assert repeat(workload([4, 4]), 2, shared_prefixes=True).hash_ids.tolist() == [0, 1, 0, 1]


def test_repeat_once_changes_nothing() -> None:
    w = workload()
    assert_same(repeat(w, 1), w)


def test_repeat_refuses_what_it_cannot_do() -> None:
    with pytest.raises(InvalidArgument, match="times must be at least 1"):
        repeat(workload(), 0)
    with pytest.raises(InvalidArgument, match="gap_ns must be at least 0"):
        repeat(workload(), 2, gap_ns=-1)
    with pytest.raises(InvalidArgument, match="without arrivals"):
        repeat(workload([4], has_arrivals=False), 2, gap_ns=1)
    with pytest.raises(InvalidArgument, match=r"past 2\^63"):
        repeat(workload([4, 4], arrival_ns=[0, 2**62]), 4)

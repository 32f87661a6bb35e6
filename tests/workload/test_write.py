from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.errors import InvalidArgument
from understudy.workload import (
    Fixed,
    Poisson,
    SyntheticSpec,
    SystemPrompts,
    Workload,
    read_mooncake,
    repeat,
    synthesise,
    write_mooncake,
)
from workload.building import assert_same, workload


def written_and_read(w: Workload, name: str = "trace.jsonl") -> Workload:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, name)
        write_mooncake(w, path)
        return read_mooncake(path, trace_block_size=w.trace_block_size)


def chats() -> Workload:
    return synthesise(
        SyntheticSpec(
            sessions=12,
            prompt_tokens=Fixed(100),
            followup_tokens=Fixed(9),
            output_tokens=Fixed(20),
            turns=Fixed(2),
            think_time_ms=Fixed(3.25),
            arrivals=Poisson(10),
            prefixes=SystemPrompts(2, 64),
        )
    )


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_synthetic_workload_survives_the_round_trip(name: str) -> None:
    w = chats()
    back = written_and_read(w, name)
    assert_same(back, w, but=("session_ids",))
    assert back.session_ids == [f"session_{session}" for session in range(12)]


def test_an_empty_workload_survives_the_round_trip() -> None:
    assert len(written_and_read(workload([]))) == 0


def test_the_same_workload_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "a.jsonl.gz", "b.jsonl.gz"):
        write_mooncake(chats(), tmp_path / name)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_rows_say_no_more_than_needed(tmp_path: Path) -> None:
    write_mooncake(workload([4]), tmp_path / "t")
    assert (
        tmp_path / "t"
    ).read_text() == '{"timestamp":0,"input_length":4,"output_length":3,"hash_ids":[0]}\n'


def test_a_workload_without_arrivals_is_written_without_timestamps() -> None:
    w = workload([4, 4], arrival_ns=[0, 0], has_arrivals=False)
    assert_same(written_and_read(w), w)


def test_renumbered_tokens_stay_equal() -> None:
    """Readers number hash ids anew; an exact output that quotes a later prompt must follow."""
    w = workload(
        [4, 4],
        hash_ids=[30, 20],
        output_tokens=[2, 2],
        output_token_ids=[20, 99],
        output_token_offsets=[0, 2, 2],
    )
    back = written_and_read(w)
    assert back.hash_ids.tolist() == [0, 1]
    assert back.output_token_ids is not None
    assert back.output_token_ids.tolist() == [1, 2]


def test_a_time_that_milliseconds_cannot_tell_is_refused_before_writing(tmp_path: Path) -> None:
    w = workload([4], arrival_ns=[1_700_000_000_000_000_001])
    with pytest.raises(InvalidArgument, match=r"arrival_ns\[0\] = 1700000000000000001 has no exact value"):
        write_mooncake(w, tmp_path / "t")
    assert not (tmp_path / "t").exists()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot write .*nowhere"):
        write_mooncake(workload(), tmp_path / "nowhere" / "t")


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Any workload that has names for its sessions and hash ids by first appearance, as a file gives them."""
    sessions = draw(st.lists(st.integers(0, 4), max_size=12))
    order = list(dict.fromkeys(sessions))
    session = [order.index(name) for name in sessions]
    turn = [session[:row].count(index) for row, index in enumerate(session)]
    rows = len(session)
    size = draw(st.integers(1, 5))
    prompts = draw(st.lists(st.integers(1, 12), min_size=rows, max_size=rows))
    outputs = draw(st.lists(st.integers(0, 3), min_size=rows, max_size=rows))
    counts = [-(-tokens // size) for tokens in prompts]
    raw = draw(st.lists(st.integers(0, 20), min_size=sum(counts), max_size=sum(counts)))
    seen = list(dict.fromkeys(raw))
    arrived = draw(st.booleans()) or not rows
    times = st.integers(0, 10**15)
    first_ns = draw(st.lists(times if arrived else st.just(0), min_size=len(order), max_size=len(order)))
    columns: dict[str, Any] = {}
    if rows and draw(st.booleans()):
        given = draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
        lengths = [outputs[row] if given[row] else 0 for row in range(rows)]
        if sum(lengths):
            tokens = st.lists(st.integers(0, 2**32 - 1), min_size=sum(lengths), max_size=sum(lengths))
            columns |= {"output_token_offsets": np.cumsum([0, *lengths]), "output_token_ids": draw(tokens)}
    if rows and draw(st.booleans()):
        columns["request_ids"] = draw(
            st.lists(st.text(min_size=1), min_size=rows, max_size=rows, unique=True)
        )
    if rows and draw(st.booleans()):
        columns["strict_priority"] = [
            *draw(st.lists(st.integers(0, 9), min_size=rows - 1, max_size=rows - 1)),
            1,
        ]
    if rows and draw(st.booleans()):
        columns["abort_after_ns"] = [
            0,
            *draw(st.lists(st.integers(-1, 10**15), min_size=rows - 1, max_size=rows - 1)),
        ]
    if rows and draw(st.booleans()):
        columns |= {"policy_class": [0, *[-1] * (rows - 1)], "policy_classes": ("gold",)}
    return Workload(
        arrival_ns=np.array([first_ns[index] for index in session], np.int64),
        prompt_tokens=np.array(prompts, np.int32),
        output_tokens=np.array(outputs, np.int32),
        hash_offsets=np.cumsum([0, *counts]),
        hash_ids=np.array([seen.index(value) for value in raw], np.uint32),
        trace_block_size=size,
        has_arrivals=arrived,
        session=np.array(session, np.int32),
        turn=np.array(turn, np.int32),
        delay_ns=np.array([draw(times) if place else 0 for place in turn], np.int64),
        priority=np.array(draw(st.lists(st.integers(-9, 9), min_size=rows, max_size=rows)), np.int32),
        session_ids=[f"s{index}" for index in range(len(order))] if rows else None,
        **columns,
    )


@settings(max_examples=50, deadline=None)
@given(workloads(), st.sampled_from(["t.jsonl", "t.jsonl.gz"]))
def test_any_workload_survives_the_round_trip(w: Workload, name: str) -> None:
    assert_same(written_and_read(w, name), w)


@settings(max_examples=30, deadline=None)
@given(workloads(), st.integers(1, 3))
def test_copies_survive_the_round_trip_and_the_first_is_the_original(w: Workload, times: int) -> None:
    w = replace(w, output_token_offsets=None, output_token_ids=None)  # large tokens leave no room for copies
    copies = repeat(w, times)
    assert len(copies) == times * len(w)
    assert_same(copies.head(len(w)), w)
    assert_same(written_and_read(copies), copies)

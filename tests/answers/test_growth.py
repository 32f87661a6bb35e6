"""Growth means users: an independent program copies the lines of a trace, and `scale_users` must agree with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import understudy as us
from answers.growth_rows import SIZE, Row, agent_rows, grow, users_by_prompt, users_by_session, write
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.workload import Workload, read_mooncake, scale_users
from understudy.workload.columns import intern_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def read(path: Path, rows: list[Row]) -> Workload:
    return read_mooncake(write(path, rows), trace_block_size=SIZE)


def canonical(workload: Workload) -> tuple[str, list[str | None]]:
    """Return digest and adapters of a workload whose ids are numbered by first appearance, as a reader numbers them."""
    index = np.full(len(workload), -1) if workload.adapter is None else workload.adapter
    adapters = [None if at < 0 else workload.adapters[at] for at in index.tolist()]
    return replace(
        workload,
        hash_ids=intern_ids(workload.hash_ids),
        adapter=None,
        adapters=(),
        abort_after_ns=workload.abort_after_ns if workload.has_aborts else None,
        output_in_next=None
        if workload.output_in_next is None or not workload.output_in_next.any()
        else workload.output_in_next,
    ).digest, adapters


@st.composite
def session_rows(draw: Callable[..., Any]) -> list[Row]:
    """Draw a trace: sessions of groups that share a system prompt, in the order of time, with think times or quotes."""
    fresh = iter(range(1000, 10**6))
    rows: list[tuple[int, int, Row]] = []
    by_delay = draw(st.booleans())
    for session in range(draw(st.integers(1, 6))):
        group = draw(st.integers(0, 2))
        ids = [100 * group + place for place in range(group)]  # group 0 shares nothing
        time = draw(st.integers(0, 5_000))
        length = SIZE * len(ids)
        begins = time
        for turn in range(draw(st.integers(1, 5))):
            length += draw(st.integers(1, 3 * SIZE))
            ids = ids + [next(fresh) for _ in range(-(-length // SIZE) - len(ids))]
            row: Row = {"session_id": f"s{session}", "input_length": length, "hash_ids": list(ids)}
            row["output_length"] = draw(st.integers(1, 20))
            think = draw(st.integers(0, 500)) if turn else 0
            time += think
            if not turn:
                row["timestamp"] = time
            else:
                row["delay"] = think
            if draw(st.integers(0, 3)) == 0:
                row["priority"] = 2
            if draw(st.integers(0, 3)) == 0:
                row["lora"] = f"adapter{session % 2}"
            if draw(st.integers(0, 5)) == 0:
                row["abort_after_ms"] = draw(st.integers(0, 50))
            if turn and by_delay:
                previous = next(one for _, _, one in reversed(rows) if one["session_id"] == f"s{session}")
                if previous["input_length"] + previous["output_length"] <= length:
                    previous["output_in_next_turn"] = True
            rows.append((time if draw(st.booleans()) else begins, len(rows), row))
    # A file is in any order in which the turns of each session follow one another.
    order = sorted(rows, key=lambda one: (one[0], one[1]))
    turns = {
        name: [row for *_, row in rows if row["session_id"] == name]
        for name in {r["session_id"] for *_, r in rows}
    }
    return [turns[row["session_id"]].pop(0) for *_, row in order]


@settings(max_examples=30)
@given(
    rows=session_rows(),
    factor=st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, 2.34]),
    seed=st.integers(0, 2**64 - 1),
)
def test_users_are_the_lines_that_an_independent_program_copies(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], factor: float, seed: int
) -> None:
    compare_with_lines(tmp_path_factory.mktemp("growth"), rows, factor, seed)


@pytest.mark.soak
@settings(max_examples=2000)
@given(rows=session_rows(), factor=st.floats(0.3, 6), seed=st.integers(0, 2**64 - 1))
def test_users_are_the_lines_that_an_independent_program_copies_at_length(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], factor: float, seed: int
) -> None:
    compare_with_lines(tmp_path_factory.getbasetemp(), rows, factor, seed)


def compare_with_lines(folder: Path, rows: list[Row], factor: float, seed: int) -> None:
    workload = read(folder / "trace.jsonl", rows)
    users = users_by_session(rows)
    if round((max(users) + 1) * factor) == 0:
        with pytest.raises(ConfigError, match=r"users: .* is none; give at least"):
            scale_users(workload, factor, seed=seed)
        return
    scaled = scale_users(workload, factor, seed=seed)
    if factor == 1:
        assert scaled is workload
        return
    copied = read(folder / "copied.jsonl", grow(rows, users, factor, seed))
    assert canonical(scaled) == canonical(copied)
    assert scaled.session_ids == copied.session_ids
    engine = VllmConfig(num_gpu_blocks=40, block_size=SIZE, max_num_seqs=4, enable_lora=True, max_loras=2)
    ours = us.replay(workload, engine, users=factor, seed=seed, workers=2)
    theirs = us.replay(copied, engine, seed=seed, workers=2)
    assert ours.run.digest == theirs.run.digest
    assert ours.prefix_hit_ratio == theirs.prefix_hit_ratio
    assert ours.run.users == factor


@st.composite
def anonymous_rows(draw: Callable[..., Any]) -> list[Row]:
    """Draw a trace without session ids: conversations, retries and forks behind system prompts of two groups."""
    fresh = iter(range(1000, 10**6))
    keeps_ids = draw(st.booleans())  # of partly filled blocks
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 7))):
        group = draw(st.integers(0, 2))
        past = [([100 * group + place for place in range(group)], SIZE * group)]
        time = draw(st.integers(0, 4000))
        for _ in range(draw(st.integers(1, 5))):
            ids, length = past[-1 if draw(st.integers(0, 4)) else draw(st.integers(0, len(past) - 1))]
            length += draw(st.integers(0 if rows and length else 1, 3 * SIZE))
            if not keeps_ids:
                ids = ids[: length // SIZE]
            ids = ids + [next(fresh) for _ in range(-(-length // SIZE) - len(ids))]
            past.append((ids if keeps_ids or length % SIZE == 0 else ids[:-1], length))
            output = draw(st.integers(1, 12))
            rows.append({"timestamp": time, "input_length": length, "output_length": output, "hash_ids": ids})
            time += draw(st.integers(0, 400))
    return rows if draw(st.booleans()) else sorted(rows, key=lambda row: row["timestamp"])


@settings(max_examples=40)
@given(rows=anonymous_rows(), factor=st.sampled_from([0.5, 2.0, 2.5]), seed=st.integers(0, 9))
def test_users_without_session_ids_are_found_by_prompts_as_an_independent_program_finds_them(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], factor: float, seed: int
) -> None:
    compare_anonymous(tmp_path_factory.mktemp("growth"), rows, factor, seed)


@pytest.mark.soak
@settings(max_examples=2000)
@given(rows=anonymous_rows(), factor=st.floats(0.3, 5), seed=st.integers(0, 9))
def test_users_without_session_ids_are_found_by_prompts_at_length(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], factor: float, seed: int
) -> None:
    compare_anonymous(tmp_path_factory.getbasetemp(), rows, factor, seed)


def compare_anonymous(folder: Path, rows: list[Row], factor: float, seed: int) -> None:
    workload = read(folder / "trace.jsonl", rows)
    users = users_by_prompt(rows, SIZE)
    if round((max(users) + 1) * factor) == 0:
        return
    scaled = scale_users(workload, factor, seed=seed)
    assert canonical(scaled) == canonical(read(folder / "copied.jsonl", grow(rows, users, factor, seed)))


def test_users_scale_requests_and_tokens_keep_think_times_and_give_copies_ids_of_their_own(
    tmp_path: Path,
) -> None:
    rows = agent_rows(12)
    workload = read(tmp_path / "trace.jsonl", rows)
    scaled = scale_users(workload, 3, seed=7)
    assert len(scaled) == 3 * len(workload)
    assert scaled.total_prompt_tokens == 3 * workload.total_prompt_tokens
    assert scaled.total_output_tokens == 3 * workload.total_output_tokens
    names = scaled.session_ids
    assert names is not None
    by_name: dict[str, list[int]] = {}
    for row, session in enumerate(scaled.session.tolist()):
        by_name.setdefault(names[session], []).append(row)
    private: list[set[int]] = []
    for name in [f"s{session}" for session in range(12)]:
        turns = [by_name[f"{name}{suffix}"] for suffix in ("", "#1", "#2")]
        delays = [scaled.delay_ns[one].tolist() for one in turns]
        assert delays[0] == delays[1] == delays[2]
        arrivals = [int(scaled.arrival_ns[one[0]]) for one in turns]
        assert len(set(arrivals)) == 3
        assert all(0 < arrival - arrivals[0] <= 60_000_000_000 for arrival in arrivals[1:])
        ids = [set(np.concatenate([scaled.prompt_hash_ids(row) for row in one]).tolist()) for one in turns]
        assert set(range(8)) == ids[0] & ids[1] == ids[0] & ids[2] == ids[1] & ids[2]
        private += [one - set(range(8)) for one in ids]
    assert not private or max(Counter(number for one in private for number in one).values()) == 1


def test_every_fraction_has_its_number_of_sessions_and_contains_the_smaller_fractions(tmp_path: Path) -> None:
    workload = read(tmp_path / "trace.jsonl", agent_rows())
    factors = [0.05, 0.1, 0.25, 0.5, 0.9, 1.0, 1.1, 1.5, 1.9, 2.0, 2.5, 3.0]
    found = []
    for factor in factors:
        scaled = scale_users(workload, factor, seed=3)
        assert scaled.sessions == round(40 * factor)
        arrivals = dict(
            zip(scaled.session_ids or [], scaled.arrival_ns[scaled.turn == 0].tolist(), strict=True)
        )
        found.append(set(arrivals.items()))
    assert all(small < large for small, large in pairwise(found))


def test_a_sample_favours_no_session(tmp_path: Path) -> None:
    workload = read(tmp_path / "trace.jsonl", agent_rows(20))
    counts: Counter[str] = Counter()
    for seed in range(400):
        counts.update(scale_users(workload, 0.3, seed=seed).session_ids or [])
    assert sum(counts.values()) == 400 * 6
    # 120 of 400 are expected; the standard deviation of one count is 9.2.
    assert set(counts) == {f"s{number}" for number in range(20)}
    assert max(abs(count - 120) for count in counts.values()) < 37


def test_an_anonymous_agent_trace_has_the_users_that_its_names_would_tell(tmp_path: Path) -> None:
    named = read(tmp_path / "named.jsonl", agent_rows())
    anonymous = scale_users(read(tmp_path / "anonymous.jsonl", agent_rows(named=False)), 2)
    assert len(anonymous) == 2 * len(named)
    assert "80 in place of 40 users" in anonymous.notes[-1]
    assert "80 in place of 40 sessions" in scale_users(named, 2).notes[-1]


def test_traces_of_lengths_get_users_without_any_shared_block(tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": at * 10,
            "input_length": 3 * SIZE,
            "output_length": 4,
            "hash_ids": [3 * at, 3 * at + 1, 3 * at + 2],
        }
        for at in range(30)
    ]
    scaled = scale_users(read(tmp_path / "trace.jsonl", rows), 4)
    assert len(scaled) == 120
    assert len(set(scaled.hash_ids.tolist())) == len(scaled.hash_ids)


def test_a_trace_without_times_gets_copies_right_after_their_originals(tmp_path: Path) -> None:
    rows = [
        {"session_id": f"s{at}", "input_length": SIZE, "output_length": 4, "hash_ids": [at]}
        for at in range(3)
    ]
    scaled = scale_users(read(tmp_path / "trace.jsonl", rows), 2)
    assert scaled.session_ids == ["s0", "s0#1", "s1", "s1#1", "s2", "s2#1"]
    assert not scaled.has_arrivals


def test_growth_of_a_grown_workload_multiplies_and_keeps_names_unique(tmp_path: Path) -> None:
    workload = read(tmp_path / "trace.jsonl", agent_rows(5))
    twice = scale_users(scale_users(workload, 2), 2)
    assert twice.users == 4
    assert twice.sessions == len(set(twice.session_ids or [])) == 20


def test_exact_outputs_are_private_like_the_prompts_that_quote_them(tmp_path: Path) -> None:
    first = {"session_id": "a", "timestamp": 0, "input_length": 2, "output_length": 2, "hash_ids": [0, 1]}
    rows = [
        {**first, "output_token_ids": [2, 3]},
        {"session_id": "a", "delay": 5, "input_length": 5, "output_length": 1, "hash_ids": [0, 1, 2, 3, 4]},
        {"session_id": "b", "timestamp": 9, "input_length": 2, "output_length": 1, "hash_ids": [0, 5]},
    ]
    workload = read_mooncake(write(tmp_path / "trace.jsonl", rows), trace_block_size=1)
    scaled = scale_users(workload, 2)
    assert scaled.session_ids is not None
    for name in ("a", "a#1"):
        turns = np.flatnonzero(scaled.session == scaled.session_ids.index(name))
        known = scaled.known_output_tokens(int(turns[0]))
        assert known is not None
        assert known.tolist() == scaled.prompt_hash_ids(int(turns[1]))[2:4].tolist()
    assert (
        len(set((scaled.output_token_ids if scaled.output_token_ids is not None else np.empty(0)).tolist()))
        == 4
    )


def test_many_copies_of_sparse_users_do_not_arrive_in_bursts(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"timestamp": 120_000 * at, "input_length": SIZE, "output_length": 8, "hash_ids": [at]}
        for at in range(90)
    ]
    grown = scale_users(read(tmp_path / "sparse.jsonl", rows), 100)
    minutes = np.bincount(grown.arrival_ns // 60_000_000_000)
    assert len(grown) == 9_000
    assert (
        minutes[20:170].max() < 1.6 * minutes.mean()
    )  # with all copies within a minute, every other minute has none
    assert minutes[20:170].min() > 0

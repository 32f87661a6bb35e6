"""Sessions in request logs: found by their ids, or because one prompt extends another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from understudy.cli import main
from understudy.workload import read_trace, write_mooncake
from workload.building import assert_same

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.workload import Workload

SYSTEM = {"role": "system", "content": "You are a patient librarian. " * 20}
START = 1_700_000_000


def log(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talk(name: str, turns: int) -> list[dict[str, Any]]:
    """Return the messages of a conversation that ends with a question."""
    messages = [SYSTEM]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{name} asks question {turn}. " * 8})
        if turn + 1 < turns:
            messages.append({"role": "assistant", "content": f"Answer {turn} to {name}. " * 8})
    return messages


def request(name: str, turns: int, second: float, **more: Any) -> dict[str, Any]:
    return {"messages": talk(name, turns), "timestamp": START + second, "max_tokens": 30, **more}


def sessions(workload: Workload) -> list[tuple[int, int]]:
    return list(zip(workload.session.tolist(), workload.turn.tolist(), strict=True))


def test_prompts_that_extend_one_another_are_turns_of_a_session(tmp_path: Path) -> None:
    rows = [request("Ann", 1, 0), request("Bob", 1, 1), request("Ann", 2, 5), request("Ann", 3, 9.5)]
    workload = read_trace(log(tmp_path, *rows), "openai")
    assert sessions(workload) == [(0, 0), (1, 0), (0, 1), (0, 2)]
    assert workload.arrival_ns.tolist() == [0, 10**9, 0, 0]
    assert workload.delay_ns.tolist() == [0, 0, 5 * 10**9, 4_500_000_000]
    assert any("2 of 4 requests continue an earlier one" in note for note in workload.notes)
    assert any("no end times" in note for note in workload.notes)


def test_the_think_time_starts_at_the_end_of_the_answer_if_the_log_has_it(tmp_path: Path) -> None:
    rows = [request("Ann", 1, 0, completed_at=START + 2), request("Ann", 2, 5, completed_at=START + 7)]
    workload = read_trace(log(tmp_path, *rows), "openai")
    assert workload.delay_ns.tolist() == [0, 3 * 10**9]
    assert not any("no end times" in note for note in workload.notes)


@pytest.mark.parametrize(
    "place",
    [
        lambda name: {"session_id": name},
        lambda name: {"conversation_id": name},
        lambda name: {"metadata": {"session_id": name}},
        lambda name: {"conversation": {"id": name}},
    ],
)
def test_ids_decide_where_the_log_has_them(tmp_path: Path, place: Any) -> None:
    rows = [
        request("Ann", 1, 0, **place("a")),
        request("Ann", 2, 1, **place("b")),
        request("Cat", 1, 2, **place("a")),
    ]
    workload = read_trace(log(tmp_path, *rows), "openai")
    assert sessions(workload) == [(0, 0), (1, 0), (0, 1)]
    assert any("by the log's session ids" in note for note in workload.notes)
    assert workload.session_ids is None
    assert read_trace(log(tmp_path, *rows), "openai", keep_ids=True).session_ids == ["a", "b"]


def test_turns_that_overlap_in_the_log_are_counted_in_a_note(tmp_path: Path) -> None:
    rows = [request("Ann", 1, 0, session_id="a", end_time=START + 9), request("Bob", 1, 4, session_id="a")]
    workload = read_trace(log(tmp_path, *rows), "openai")
    assert workload.delay_ns.tolist() == [0, 0]
    assert any("1 turns began before" in note for note in workload.notes)


def test_a_session_continues_only_once_and_other_branches_start_their_own(tmp_path: Path) -> None:
    workload = read_trace(
        log(tmp_path, request("Ann", 1, 0), request("Ann", 2, 1), request("Ann", 2, 2)), "openai"
    )
    assert sessions(workload) == [(0, 0), (0, 1), (1, 0)]


def test_another_answer_is_another_session(tmp_path: Path) -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": "Quite another answer."}}]}
    rows = [request("Ann", 1, 0, response=answer), request("Ann", 2, 5)]
    assert sessions(read_trace(log(tmp_path, *rows), "openai")) == [(0, 0), (1, 0)]
    answer["choices"][0]["message"]["content"] = "<think>hm</think>" + "Answer 0 to Ann. " * 8
    rows = [request("Ann", 1, 0, response=answer), request("Ann", 2, 5)]
    assert sessions(read_trace(log(tmp_path, *rows), "openai")) == [(0, 0), (0, 1)]


def test_an_answer_that_the_next_prompt_repeats_is_cached_for_it(tmp_path: Path) -> None:
    usage = [{"prompt_tokens": 200, "completion_tokens": 30}, {"prompt_tokens": 300, "completion_tokens": 9}]
    rows = [request("Ann", 1, 0, usage=usage[0]), request("Ann", 2, 5, usage=usage[1])]
    workload = read_trace(log(tmp_path, *rows), "openai")
    assert workload.output_in_next is not None
    assert workload.output_in_next.tolist() == [True, False]
    usage[1]["prompt_tokens"] = 210  # the next prompt has no room for the answer: a template dropped it
    rows = [request("Ann", 1, 0, usage=usage[0]), request("Ann", 2, 5, usage=usage[1])]
    workload = read_trace(log(tmp_path, *rows), "openai")
    assert workload.output_in_next is None or not workload.output_in_next.any()


def test_texts_of_completions_extend_one_another_too(tmp_path: Path) -> None:
    story = "Call me Ishmael. " * 10
    rows = [
        {"prompt": story, "timestamp": START, "choices": [{"text": "Some years ago"}]},
        {"prompt": "Sea.", "timestamp": START + 1, "max_tokens": 3},
        {"prompt": story + "Some years ago, never mind", "timestamp": START + 2, "max_tokens": 3},
        {"prompt": "Sea. And sand", "timestamp": START + 3, "max_tokens": 3},
    ]
    workload = read_trace(log(tmp_path, *rows), "openai")
    assert sessions(workload) == [(0, 0), (1, 0), (0, 1), (2, 0)]  # "Sea." is shorter than a block


def test_a_log_in_the_order_of_completion_is_sorted_by_time(tmp_path: Path) -> None:
    rows = [request("Ann", 2, 5), request("Bob", 1, 1), request("Ann", 1, 0)]
    workload = read_trace(log(tmp_path, *rows), "openai")
    assert sessions(workload) == [(0, 0), (1, 0), (0, 1)]


def test_a_converted_log_keeps_sessions_and_notes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path, request("Ann", 1, 0), request("Bob", 1, 1), request("Ann", 2, 5))
    out = tmp_path / "trace.jsonl"
    assert main(["convert", str(path), str(out), "--format", "openai"]) == 0
    assert "3 requests in 2 sessions" in capsys.readouterr().err
    ours, theirs = read_trace(out, trace_block_size=16), read_trace(path, "openai")
    assert_same(ours, theirs, but=("session_ids",))
    assert ours.notes == theirs.notes != ()


# ── Notes in a Mooncake trace ──


def test_notes_are_a_key_of_the_first_row_that_other_readers_ignore(tmp_path: Path) -> None:
    path = log(tmp_path, request("Ann", 1, 0), request("Bob", 1, 1))
    workload = read_trace(path, "openai")
    write_mooncake(workload, tmp_path / "trace.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert rows[0]["notes"] == list(workload.notes)
    assert "notes" not in rows[1]
    assert all({"timestamp", "input_length", "output_length", "hash_ids"} <= row.keys() for row in rows)


def test_notes_of_files_written_behind_each_other_are_all_kept_once(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    path = log(tmp_path, {**row, "notes": ["one", "two"]}, row, {**row, "notes": ["two", "three"]})
    assert read_trace(path).notes == ("one", "two", "three")


def test_notes_stay_when_rows_are_selected(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}
    workload = read_trace(log(tmp_path, {**row, "notes": ["one"]}, row))
    assert workload.take(np.array([1])).notes == ("one",)
    delta = read_trace(log(tmp_path, {**row, "session_id": "s", "notes": ["one"]}), "mooncake-delta")
    assert "one" in delta.notes


@pytest.mark.parametrize("notes", ['"one"', "[1]", "{}"])
def test_notes_that_are_no_list_of_texts_are_refused(tmp_path: Path, notes: str) -> None:
    from understudy.errors import InvalidArgument

    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"timestamp": 0, "output_length": 1, "hash_ids": [1], "notes": {notes}}}\n')
    with pytest.raises(InvalidArgument, match=r"trace\.jsonl:1: notes"):
        read_trace(path)


def test_every_report_of_a_converted_trace_has_the_notes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log(tmp_path, request("Ann", 1, 0), request("Bob", 1, 1))
    trace, page, saved = (tmp_path / name for name in ("trace.jsonl", "page.html", "run.json"))
    assert main(["convert", str(path), str(trace), "--format", "openai"]) == 0
    outputs = ["--html", str(page), "--json", str(saved)]
    assert main(["replay", str(trace), "--trace-block-size", "16", *outputs]) == 0
    note = "lengths are approximate"
    assert note in capsys.readouterr().out
    assert note in page.read_text()
    assert any(note in one for one in json.loads(saved.read_text())["run"]["notes"])
    both = tmp_path / "compare.html"
    assert main(["compare", str(saved), str(saved), "--html", str(both)]) == 0
    assert note in capsys.readouterr().out
    assert both.read_text().count(note) == 1

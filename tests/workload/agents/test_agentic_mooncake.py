"""`agentic_mooncake` version 2: reading, writing, conversion of other formats to it, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from understudy.cli import main
from understudy.errors import InvalidArgument
from understudy.workload import Workload, read_trace, scale_users, write_agentic_mooncake, write_mooncake
from understudy.workload.columns import intern_ids
from workload.agents.test_weka import edges, request, sessions, subagent, trace

if TYPE_CHECKING:
    from pathlib import Path

HEADER = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local"}


def row(
    name: str, *dependencies: tuple[str, str, float, str], play: str = "A", **more: Any
) -> dict[str, Any]:
    base: dict[str, Any] = {"request_id": name, "play_id": play, "session_id": f"{play}:root", "model": "m"}
    base |= {"input_length": 130, "output_length": 7, "hash_ids": [5, 6, 7], "not_before_ms": 0}
    keys = ("request_id", "trigger", "delay_ms", "relation")
    return {**base, "dependencies": [dict(zip(keys, one, strict=True)) for one in dependencies], **more}


def write(path: Path, *rows: dict[str, Any], header: dict[str, Any] | None = None) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in (header or HEADER, *rows)))
    return path


def test_requests_have_the_dependencies_of_their_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path / "graph.jsonl",
        row("a0"),
        row("a1", ("a0", "dispatch", 0.25, "spawn"), session_id="A:left", not_before_ms=1.5),
        row("a2", ("a0", "completion", 3, "sequence"), ("a1", "completion", 0, "join")),
        row("b0", play="B", not_before_ms=2000),
    )
    workload = read_trace(path)
    assert edges(workload) == {
        "a0": set(),
        "a1": {("a0", "dispatch", 250_000, "spawn")},
        "a2": {("a0", "completion", 3_000_000, "sequence"), ("a1", "completion", 0, "join")},
        "b0": set(),
    }
    assert workload.graph is not None
    assert workload.graph.play_ids == ["A", "B"]
    assert workload.graph.not_before_ns.tolist() == [0, 1_500_000, 0, 2_000_000_000]
    assert workload.turn.tolist() == [0, 0, 1, 0]
    assert workload.prompt_hash_ids(0).tolist() == workload.prompt_hash_ids(3).tolist()  # plays share blocks


def test_names_that_two_plays_use_get_the_name_of_the_play(tmp_path: Path) -> None:
    first, second = row("r", session_id="s"), row("r", play="B", session_id="s")
    workload = read_trace(write(tmp_path / "graph.jsonl", first, second))
    assert workload.request_ids == ["A:r", "B:r"]
    assert workload.session_ids == ["A:s", "B:s"]


def test_plays_are_in_the_order_of_their_ordinals(tmp_path: Path) -> None:
    rows = [
        row("b0", play="B", source_play_ordinal=1),
        row("a0", source_play_ordinal=0),
        row("a1", ("a0", "completion", 1, "sequence"), source_play_ordinal=0),
    ]
    workload = read_trace(write(tmp_path / "graph.jsonl", *rows))
    assert workload.request_ids == ["a0", "a1", "b0"]
    assert edges(workload)["a1"] == {("a0", "completion", 1_000_000, "sequence")}


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    rows = [
        row("a0", output_token_ids=list(range(7)), priority=3, strict_priority=2, policy_class="fast"),
        row("a1", ("a0", "dispatch", 0.25, "spawn"), not_before_ms=0.000001),
    ]
    workload = read_trace(write(tmp_path / "graph.jsonl", *rows))
    write_agentic_mooncake(workload, tmp_path / "again.jsonl.gz")
    again = read_trace(tmp_path / "again.jsonl.gz")
    assert again.digest == workload.digest
    assert (again.request_ids, again.session_ids) == (workload.request_ids, workload.session_ids)


def test_a_weka_trace_converts_to_the_same_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner = [request(0.1, [9, 8], api_time=1)]
    requests = [request(0, [1], api_time=2), subagent(2.2, inner, duration_ms=3000), request(6, [1, 2])]
    source, out = tmp_path / "weka.jsonl", tmp_path / "graph.jsonl"
    source.write_text("".join(json.dumps(trace(requests, name)) + "\n" for name in ("one", "two")))
    assert main(["convert", str(source), str(out), "--format", "weka", "--to", "agentic-mooncake"]) == 0
    assert "6 requests in 4 sessions" in capsys.readouterr().err
    before, after = read_trace(source), read_trace(out)
    assert edges(after) == edges(before)
    assert sessions(after) == sessions(before)
    assert after.digest == before.digest
    header, first = (json.loads(line) for line in out.read_text().splitlines()[:2])
    assert (header["schema"], header["version"], header["source"]["format"]) == (HEADER["schema"], 2, "weka")
    assert (first["request_id"], first["play_id"], first["session_id"]) == ("one:outer:0", "one", "one:root")


def test_sessions_convert_to_plays_whose_turns_follow_one_another(tmp_path: Path) -> None:
    workload = Workload(
        arrival_ns=np.array([5, 7, 5]) * 10**6,
        prompt_tokens=np.array([64, 64, 128]),
        output_tokens=np.array([4, 4, 4]),
        hash_offsets=np.array([0, 1, 2, 4]),
        hash_ids=np.array([1, 2, 1, 3]),
        trace_block_size=64,
        session=np.array([0, 1, 0]),
        turn=np.array([0, 0, 1]),
        delay_ns=np.array([0, 0, 9]) * 10**6,
    )
    write_mooncake(workload, tmp_path / "plain.jsonl")
    arguments = ["convert", str(tmp_path / "plain.jsonl"), str(tmp_path / "graph.jsonl")]
    assert main([*arguments, "--trace-block-size", "64", "--to", "agentic-mooncake"]) == 0
    again = read_trace(tmp_path / "graph.jsonl")
    assert edges(again) == {
        "request_0": set(),
        "request_1": set(),
        "request_2": {("request_0", "completion", 9_000_000, "sequence")},
    }
    assert again.graph is not None
    assert again.graph.not_before_ns.tolist() == [0, 2_000_000, 0]


def test_recorded_times_of_service_stay_with_their_requests(tmp_path: Path) -> None:
    rows = [row("a0", recorded_api_time_ms=12.5), row("a1"), row("b0", play="B", recorded_api_time_ms=0)]
    workload = read_trace(write(tmp_path / "graph.jsonl", *rows))
    assert workload.graph is not None
    assert workload.graph.recorded_service_ns is not None
    assert workload.graph.recorded_service_ns.tolist() == [12_500_000, -1, 0]
    write_agentic_mooncake(workload.take(np.array([2])), tmp_path / "again.jsonl")
    _, only = map(json.loads, (tmp_path / "again.jsonl").read_text().splitlines())
    assert only["recorded_api_time_ms"] == 0
    source = tmp_path / "weka.jsonl"
    source.write_text(json.dumps(trace([request(0, [1], api_time=2), request(6, [1, 2])], "one")))
    write_agentic_mooncake(read_trace(source), tmp_path / "lowered.jsonl")
    lowered = [json.loads(line) for line in (tmp_path / "lowered.jsonl").read_text().splitlines()[1:]]
    assert [one.get("recorded_api_time_ms") for one in lowered] == [2000, None]
    doubled = scale_users(workload, 2)
    assert doubled.graph is not None
    assert doubled.graph.recorded_service_ns is not None
    assert sorted(doubled.graph.recorded_service_ns.tolist()) == [-1, -1, 0, 0, 12_500_000, 12_500_000]


def test_a_graph_is_not_written_as_a_mooncake_trace(tmp_path: Path) -> None:
    workload = read_trace(write(tmp_path / "graph.jsonl", row("a0")))
    with pytest.raises(InvalidArgument, match="--to agentic-mooncake"):
        write_mooncake(workload, tmp_path / "plain.jsonl")


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([row("a0"), row("a0")], r":3: request_id: 'a0' is already in .*:2"),
        (
            [row("a0", hash_ids=[1, 2])],
            r":2: hash_ids: an input_length of 130 has 3 blocks of 64 tokens, got 2",
        ),
        (
            [row("a0", ("x", "completion", 0, "join"))],
            r":2: dependencies\[0\]\.request_id: 'x' is not in the file",
        ),
        (
            [row("a0"), row("b0", ("a0", "completion", 0, "join"), play="B")],
            r":3: dependencies\[0\]\.request_id: 'a0' is in play 'A'",
        ),
        (
            [row("a0", ("a0", "finish", 0, "join"))],
            r":2: dependencies\[0\]\.trigger: Invalid enum value 'finish'",
        ),
        (
            [row("a0", ("a0", "completion", -1, "join"))],
            r":2: dependencies\[0\]\.delay_ms: must be at least 0",
        ),
        (
            [row("a0", ("a1", "completion", 0, "join")), row("a1", ("a0", "dispatch", 0, "spawn"))],
            r":2: dependencies: request 'a0' waits for itself",
        ),
        ([{**row("a0"), "recorded_api_time_ms": -1}], r":2: recorded_api_time_ms: must be at least 0"),
        *(
            ([{key: value for key, value in row("a0").items() if key != name}], f":2: {name} is missing")
            for name in ("hash_ids", "not_before_ms", "dependencies", "play_id")
        ),
        ([row("a0", wait_for=["x"])], r":2: Object contains unknown field `wait_for`"),
        ([row("a0", source_play_ordinal=0), row("a1")], r":3: source_play_ordinal: is missing"),
        (
            [row("a0", output_token_ids=[1])],
            r":2: output_token_ids: needs output_length \(7\) entries, got 1",
        ),
    ],
)
def test_a_refusal_names_file_line_and_key(tmp_path: Path, rows: list[dict[str, Any]], named: str) -> None:
    with pytest.raises(InvalidArgument, match="graph.jsonl" + named):
        read_trace(write(tmp_path / "graph.jsonl", *rows))


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "graph.jsonl", row("a0"), header={**HEADER, "version": 1})
    with pytest.raises(InvalidArgument, match=r"graph.jsonl:1: version: must be 2, got 1"):
        read_trace(path)


def test_lists_of_ids_are_read_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write(tmp_path / "graph.jsonl", *(row(f"a{at}", hash_ids=[at, 7, 90 + at]) for at in range(5)))
    whole = read_trace(path)
    monkeypatch.setattr("understudy.workload.agents.mooncake._LISTS_AT_ONCE", 2)
    assert read_trace(path).digest == whole.digest
    bad = write(tmp_path / "bad.jsonl", *(row(f"a{at}", hash_ids=[at - 3, 7, 8]) for at in range(5)))
    with pytest.raises(InvalidArgument, match=r"bad\.jsonl:2: hash_ids: ids must lie in"):
        read_trace(bad)


def test_ids_are_numbered_by_first_appearance_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("understudy.workload.columns._PART", 3)
    numbered = np.array([0, 1, 0, 2, 3, 1, 4, 4, 5], np.uint64)
    assert intern_ids(numbered).tolist() == numbered.tolist()
    assert intern_ids(np.array([0, 1, 2, 4, 3], np.uint64)).tolist() == [0, 1, 2, 3, 4]
    assert intern_ids(np.array([0, 1, 2, 3, 9, 3], np.uint64)).tolist() == [0, 1, 2, 3, 4, 3]
    assert intern_ids(np.array([7, 7, 1], np.uint64)).tolist() == [0, 0, 1]

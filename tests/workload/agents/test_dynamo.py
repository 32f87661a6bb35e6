"""Dynamo's request traces: independent arrivals, sessions, sub-agents, and what is refused."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from understudy.errors import InvalidArgument
from understudy.workload import read_trace
from workload.agents.test_weka import edges

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.workload import Workload

START = 1_700_000_000_000


def ended(
    name: str, start: float, total: float, session: str | None = None, parent: str | None = None, **more: Any
) -> dict[str, Any]:
    replay = {"trace_block_size": 64, "input_length": 150, "input_sequence_hashes": [2**63 + 1, 2**64 - 1, 7]}
    request: dict[str, Any] = {"request_id": name, "model": "m", "output_tokens": 9, "replay": replay | more}
    request |= {"request_received_ms": START + start, "total_time_ms": total}
    event: dict[str, Any] = {"schema": "dynamo.request.trace.v1", "event_type": "request_end"}
    event |= {"event_time_unix_ms": START + start + total, "request": request}
    return (
        event
        if session is None
        else {**event, "agent_context": {"session_id": session, "parent_session_id": parent}}
    )


def tool(session: str, **claude: Any) -> dict[str, Any]:
    event = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": START}
    return {
        **event,
        "agent_context": {"session_id": session},
        "tool": {"tool_call_id": "t", "claude": claude},
    }


def read(tmp_path: Path, *events: dict[str, Any]) -> Workload:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in events))
    return read_trace(path)


def test_requests_without_an_agent_are_independent_arrivals(tmp_path: Path) -> None:
    workload = read(tmp_path, ended("late", 30, 5), ended("early", 10, 900))
    assert workload.graph is None
    assert workload.request_ids == ["early", "late"]
    assert workload.arrival_ns.tolist() == [0, 20_000_000]
    assert workload.hash_ids.tolist() == [0, 1, 2] * 2


def test_a_partly_filled_block_without_a_hash_belongs_to_its_request(tmp_path: Path) -> None:
    given: dict[str, Any] = {"input_sequence_hashes": [2**64 - 1, 5]}
    workload = read(tmp_path, ended("p", 0, 1, **given), ended("q", 1, 1), ended("r", 2, 1, **given))
    assert [workload.prompt_hash_ids(row).tolist() for row in range(3)] == [[0, 1, 2], [3, 0, 4], [0, 1, 5]]


def test_a_session_waits_for_its_answers_and_a_sub_agent_for_its_parent(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        ended("p0", 0, 800, "parent"),
        tool("parent", source_request_id="p0", consumer_request_id="p1", child_session_id="child"),
        ended("c0", 900, 700, "child", "parent"),
        ended("c1", 2600, 1500, "child", "parent"),
        ended("p1", 4300, 900, "parent"),
        ended("q0", 1000, 600, "other"),
    )
    assert edges(workload) == {
        "p0": set(),
        "c0": {("p0", "dispatch", 900_000_000, "spawn")},
        "q0": set(),
        "c1": {("c0", "completion", 1_000_000_000, "sequence")},
        "p1": {("p0", "completion", 3_500_000_000, "sequence"), ("c1", "completion", 200_000_000, "join")},
    }
    assert workload.graph is not None
    assert workload.graph.play_ids == ["dynamo-play:p0", "dynamo-play:q0"]
    assert workload.graph.not_before_ns.tolist() == [0, 0, 1_000_000_000, 0, 0]


def test_without_events_of_tools_a_sub_agent_begins_and_returns_by_the_recorded_times(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        ended("p0", 0, 100, "parent"),
        ended("p1", 200, 100, "parent"),
        ended("c0", 350, 100, "child", "parent"),
        ended("p2", 460, 100, "parent"),
    )
    assert edges(workload)["c0"] == {("p1", "dispatch", 150_000_000, "spawn")}
    assert ("c0", "completion", 10_000_000, "join") in edges(workload)["p2"]


def test_nothing_waits_for_a_sub_agent_in_the_background(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        ended("p0", 0, 100, "parent"),
        tool("parent", source_request_id="p0", child_session_id="child", execution_mode="background"),
        ended("c0", 350, 100, "child", "parent"),
        ended("p1", 460, 100, "parent"),
    )
    assert edges(workload)["p1"] == {("p0", "completion", 360_000_000, "sequence")}


def test_shards_of_a_folder_are_one_trace_and_events_may_be_wrapped(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"event": ended("a", 0, 5)}) + "\n")
    (tmp_path / "two.jsonl.gz").write_bytes(gzip.compress(json.dumps(ended("b", 3, 5)).encode()))
    assert read_trace(tmp_path).request_ids == ["a", "b"]


def test_a_sub_agent_that_names_an_unknown_request_is_noted(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        ended("p0", 0, 100, "parent"),
        tool("parent", source_request_id="gone", child_session_id="child"),
        ended("c0", 350, 100, "child", "parent"),
    )
    assert edges(workload)["c0"] == {("p0", "dispatch", 350_000_000, "spawn")}
    assert "name a request that is not in the trace" in workload.notes[0]


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ([ended("o", 0, 1), {**ended("p", 0, 1), "schema": "other"}], r":2: schema: must be"),
        ([{**ended("p", 0, 1), "event_type": "begin"}], r":1: event_type: must be one of"),
        ([ended("p", 0, 1), ended("p", 5, 1)], r":2: request\.request_id: 'p' is already in .*:1"),
        ([ended("p", 0, 1), ended("q", 5, 1, "s")], r":2: agent_context: .*:1 lacks one"),
        ([ended("p", 0, 1, input_length=64)], r":1: request\.replay\.input_sequence_hashes: .* has 1 blocks"),
        ([ended("p", 0, -1)], r":1: request\.total_time_ms: must be at least 0"),
        ([{**ended("p", 0, 1), "request": None}], r":1: request: is missing"),
        ([ended("p", 0, 1, trace_block_size="x")], r":1: request\.replay\.trace_block_size: Expected `int`"),
    ],
)
def test_a_refusal_names_file_line_and_key(tmp_path: Path, events: list[dict[str, Any]], named: str) -> None:
    with pytest.raises(InvalidArgument, match="events.jsonl" + named):
        read(tmp_path, *events)

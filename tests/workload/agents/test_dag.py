"""AIPerf's `dag_jsonl`: forks, spawns, joins, orchestrators, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from understudy.errors import InvalidArgument
from understudy.workload import read_trace
from workload.agents.test_weka import edges, sessions

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.workload import Workload


def turn(text: str, tokens: int = 32, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}


def session(name: str, *turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"session_id": name, "turns": list(turns), **more}


def read(tmp_path: Path, *lines: dict[str, Any]) -> Workload:
    path = tmp_path / "dag.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_trace(path)


def shared(workload: Workload, one: str, other: str) -> int:
    assert workload.request_ids is not None
    first, second = (
        workload.prompt_hash_ids(workload.request_ids.index(name)).tolist() for name in (one, other)
    )
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(map(len, (first, second))),
    )


def test_a_spawned_session_starts_fresh_and_the_next_turn_or_join_at_waits_for_it(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        session(
            "root",
            turn("Plan.", spawns=["left", {"children": ["right"], "join_at": 2}]),
            turn("Go on.", delay=250.0),
            turn("Sum up."),
        ),
        session("left", turn("Look left.")),
        session("right", turn("Look right.", delay=100.0), turn("And again.")),
    )
    assert edges(workload) == {
        "root:0": set(),
        "left:0": {("root:0", "completion", 0, "spawn")},
        "right:0": {("root:0", "completion", 100_000_000, "spawn")},
        "right:1": {("right:0", "completion", 0, "sequence")},
        "root:1": {
            ("root:0", "completion", 250_000_000, "sequence"),
            ("left:0", "completion", 250_000_000, "join"),
        },
        "root:2": {("root:1", "completion", 0, "sequence"), ("right:1", "completion", 0, "join")},
    }
    assert workload.graph is not None
    assert workload.graph.play_ids == ["root"]
    assert not workload.has_arrivals


def test_a_prompt_is_the_history_with_its_answers_and_a_fork_inherits_it(tmp_path: Path) -> None:
    long = "word " * 200
    workload = read(
        tmp_path,
        session("root", turn(long, 64), turn("More.", 64, forks=["one", "two"])),
        session("one", turn("First branch.")),
        session("two", turn("Second branch.")),
    )
    tokens = dict(zip(workload.request_ids or [], workload.prompt_tokens.tolist(), strict=True))
    assert tokens["root:1"] > tokens["root:0"] + 64
    assert tokens["one:0"] > tokens["root:1"] + 64
    assert shared(workload, "root:0", "root:1") >= tokens["root:0"] // 16
    assert shared(workload, "one:0", "two:0") >= (tokens["root:1"] + 64) // 16
    assert sessions(workload)["one:0"] == "one"


def test_a_parent_continues_beside_a_fork_in_the_background(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        session("root", turn("Plan.", forks=[{"child": "aside", "background": True}]), turn("Go on.")),
        session("aside", turn("Look.")),
    )
    assert edges(workload)["root:1"] == {("root:0", "completion", 0, "sequence")}
    assert edges(workload)["aside:0"] == {("root:0", "completion", 0, "spawn")}


def test_each_use_of_a_session_is_one_of_its_own(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        session("root", turn("A.", spawns=["tool"]), turn("B.", spawns=["tool"])),
        session("tool", turn("T.")),
    )
    assert set(edges(workload)) == {"root:0", "root:1", "tool:0", "tool#2:0"}
    assert ("tool:0", "completion", 0, "join") in edges(workload)["root:1"]


def test_rounds_of_an_orchestrator_wait_for_all_of_the_round_before(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        {"session_id": "boss", "orchestrator": True, "spawns": ["a", "b"], "rounds": 2, "think_time_ms": 5},
        session("a", turn("A.")),
        session("b", turn("B.")),
    )
    waits = {("a:0", "completion", 5_000_000, "join"), ("b:0", "completion", 5_000_000, "join")}
    assert edges(workload) == {"a:0": set(), "b:0": set(), "a#2:0": waits, "b#2:0": waits}


def test_sessions_before_the_first_turn_start_with_it(tmp_path: Path) -> None:
    workload = read(
        tmp_path, session("root", turn("A."), pre_session_spawns=["early"]), session("early", turn("E."))
    )
    assert edges(workload) == {"early:0": set(), "root:0": set()}
    assert workload.graph is not None
    assert workload.graph.plays == 1


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([session("a", turn("A."), turn("B.", forks=["x"]))], r":1: spawns: session 'x' is not in the file"),
        (
            [session("a", turn("A.", forks=["b"]), turn("B.")), session("b", turn("C."))],
            r":1: turns\[0\]\.forks: a fork",
        ),
        ([session("a", turn("A.")), session("a", turn("B."))], r":2: session_id: 'a' is already in .*:1"),
        ([session("a", turn("A.", tokens=0))], r":1: turns\[0\]\.max_tokens: must be at least 1"),
        (
            [session("a", turn("A.", temperature=1))],
            r":1: turns\[0\]: Object contains unknown field `temperature`",
        ),
        (
            [session("a", turn("A.", spawns=["b"])), session("b", turn("B.", spawns=["a"]))],
            r":1: session_id: every",
        ),
        (
            [session("r", turn("R.", spawns=["a"])), session("a", turn("A.", spawns=["a"]))],
            r":2: session_id: session 'a' starts itself",
        ),
        (
            [session("a", turn("A.", spawns=[{"children": ["b"], "join_at": 4}])), session("b", turn("B."))],
            r":1: turns\[0\]\.spawns: join_at",
        ),
    ],
)
def test_a_refusal_names_file_line_and_key(tmp_path: Path, lines: list[dict[str, Any]], named: str) -> None:
    with pytest.raises(InvalidArgument, match="dag.jsonl" + named):
        read(tmp_path, *lines)

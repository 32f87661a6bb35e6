"""Weka traces: the lowering to a graph, compared with the slow model and with expected edges, and what is refused."""

from __future__ import annotations

import gzip
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from model import weka as model
from understudy.errors import InvalidArgument
from understudy.workload import read_trace

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.workload import Workload

Edges = dict[str, set[tuple[str, str, int, str]]]


def request(t: float, ids: list[int], **more: Any) -> dict[str, Any]:
    return {
        "t": t,
        "type": "s",
        "model": "a",
        "in": 64 * max(len(ids), 1),
        "out": 80,
        "hash_ids": ids,
        **more,
    }


def subagent(t: float, requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    base = {"t": t, "type": "subagent", "agent_id": "x", "subagent_type": "Explore", "duration_ms": None}
    return {**base, "status": "completed", "requests": requests, **more}


def trace(requests: list[dict[str, Any]], name: str = "one", **more: Any) -> dict[str, Any]:
    return {
        "id": name,
        "models": ["a"],
        "block_size": 64,
        "hash_id_scope": "local",
        "requests": requests,
        **more,
    }


def read(tmp_path: Path, *traces: dict[str, Any]) -> Workload:
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in traces))
    return read_trace(path)


def edges(workload: Workload) -> Edges:
    assert workload.graph is not None
    assert workload.request_ids is not None
    names = workload.request_ids
    return {
        name: {(names[on], event, delay, kind) for on, event, delay, kind in workload.graph.dependencies(row)}
        for row, name in enumerate(names)
    }


def sessions(workload: Workload) -> dict[str, str]:
    assert workload.request_ids is not None
    assert workload.session_ids is not None
    names = [workload.session_ids[session] for session in workload.session]
    return dict(zip(workload.request_ids, names, strict=True))


def random_trace(rng: random.Random, name: str) -> dict[str, Any]:
    """Return a trace with forks, cuts of context, requests without ids, and sub-agents of both kinds."""
    clock, fresh = 0.0, iter(range(1, 10_000))
    histories: list[list[int]] = [[next(fresh) for _ in range(rng.randint(1, 5))]]

    def make(t: float, pool: list[list[int]]) -> dict[str, Any]:
        base = rng.choice(pool)
        ids = base[: rng.randint(0, len(base))] if rng.random() < 0.4 else list(base)
        ids = ids + [next(fresh) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.08:
            ids = []
        elif rng.random() < 0.08:
            ids = [next(fresh) for _ in range(rng.randint(1, 4))]
        if ids:
            pool.append(ids)
        return {
            "t": round(t, 6),
            "type": rng.choice("ns"),
            "model": "a" if rng.random() < 0.95 else "b",
            "in": rng.randint(max(1, 64 * len(ids) - 63), 64 * len(ids) + 70),
            "out": rng.choice([0, 20, 64, 65, 200]),
            "hash_ids": ids,
            **({} if rng.random() < 0.2 else {"api_time": round(rng.choice([0.0, rng.uniform(0, 6)]), 3)}),
        }

    requests: list[dict[str, Any]] = []
    for index in range(rng.randint(1, 14)):
        clock += rng.choice([0.0, 0.2, rng.uniform(0, 5), rng.uniform(0, 9000)]) if requests else 0.0
        if requests and rng.random() < 0.2:
            pool: list[list[int]] = [[next(fresh), next(fresh)]]
            nested, at = [], clock
            for _ in range(rng.randint(1, 5)):
                nested.append(make(at, pool))
                at += rng.uniform(0, 4)
            requests.append(subagent(clock, nested, agent_id=f"agent_{index}", status="async_launched"))
            if rng.random() < 0.6:
                last = max(one["t"] + one.get("api_time", 0) for one in nested)
                requests[-1] |= {"status": "completed", "duration_ms": round((last - clock) * 1e3 + 1, 3)}
            continue
        requests.append(make(max(0.0, clock - rng.choice([0, 0, 0.3])), histories))
    if requests[0]["type"] == "subagent":
        requests = [make(0.0, histories), *requests]
    return trace(requests, name)


@pytest.mark.parametrize("seed", range(120))
def test_the_core_lowers_random_traces_as_the_model_does(tmp_path: Path, seed: int) -> None:
    made = random_trace(random.Random(seed), "r")
    workload = read(tmp_path, made)
    nodes = model.lower(made, model.nested_times_are_relative([made]))
    first = min(node.start for node in nodes)
    assert edges(workload) == {
        f"r:{node.name}": {(f"r:{on}", *rest) for on, *rest in node.dependencies} for node in nodes
    }
    assert sessions(workload) == {f"r:{node.name}": f"r:{node.session}" for node in nodes}
    assert workload.graph is not None
    assert workload.request_ids is not None
    not_before = dict(zip(workload.request_ids, workload.graph.not_before_ns.tolist(), strict=True))
    assert not_before == {f"r:{node.name}": node.start - first for node in nodes}


def test_turns_follow_one_another_after_the_recorded_gap(tmp_path: Path) -> None:
    workload = read(
        tmp_path, trace([request(0, [1, 2], api_time=2), request(3.5, [1, 2, 3]), request(9, [1, 2, 3, 4])])
    )
    assert edges(workload) == {
        "one:outer:0": set(),
        "one:outer:1": {("one:outer:0", "completion", 1_500_000_000, "sequence")},
        "one:outer:2": {("one:outer:1", "completion", 5_500_000_000, "sequence")},
    }
    assert workload.graph is not None
    assert workload.graph.not_before_ns.tolist() == [0, 3_500_000_000, 9_000_000_000]
    assert workload.turn.tolist() == [0, 1, 2]


def test_a_blocking_sub_agent_starts_from_its_owner_and_a_later_request_waits_for_it(tmp_path: Path) -> None:
    inner = [request(0.1, [9, 8], api_time=1)]
    workload = read(
        tmp_path,
        trace([request(0, [1], api_time=2), subagent(2.2, inner, duration_ms=3000), request(6, [1, 2])]),
    )
    found = edges(workload)
    assert found["one:outer:1:inner:0"] == {("one:outer:0", "completion", 300_000_000, "spawn")}
    assert found["one:outer:2"] == {
        ("one:outer:0", "completion", 4_000_000_000, "sequence"),
        ("one:outer:1:inner:0", "completion", 2_700_000_000, "join"),
    }
    assert sessions(workload)["one:outer:1:inner:0"] == "one:subagent:1:x"


def test_nothing_waits_for_a_sub_agent_in_the_background(tmp_path: Path) -> None:
    inner = [request(0.2, [9], api_time=20)]
    workload = read(
        tmp_path,
        trace([request(0, [1]), subagent(2, inner, status="async_launched"), request(6, [1, 2])]),
    )
    assert {on for on, *_ in edges(workload)["one:outer:2"]} == {"one:outer:0"}


def test_blocks_are_shared_within_a_trace_and_not_between_traces(tmp_path: Path) -> None:
    rows = [request(0, [1, 2, 3], **{"in": 150}), request(5, [1, 2, 7], **{"in": 256})]
    workload = read(tmp_path, trace(rows, "one"), trace(rows, "two"))
    first, second, third, _ = (workload.prompt_hash_ids(row).tolist() for row in range(4))
    assert [len(first), len(second)] == [3, 4]
    assert first[:2] == second[:2]
    assert first[2] not in second  # a partly filled block is the request's own
    assert len({*second}) == 4
    assert not {*first, *second} & {*third}


def test_a_file_may_be_gzipped_one_object_over_many_lines_or_a_folder(tmp_path: Path) -> None:
    one, two = trace([request(0, [1])], "one"), trace([request(0, [1])], "two")
    folder = tmp_path / "traces"
    folder.mkdir()
    (folder / "b.json").write_text(json.dumps(one, indent=1))
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(two).encode()))
    (folder / "readme.txt").write_text("no trace")
    workload = read_trace(folder, "weka")
    assert workload.graph is not None
    assert workload.graph.play_ids == ["two", "one"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"requests": []}, r":1: requests: the trace has none"),
        ({"block_size": 0}, r":1: block_size: must be at least 1"),
        ({"hash_id_scope": "global"}, r":1: hash_id_scope: "),
        ({"requests": [request(0, [1], type="x")]}, r":1: requests\[0\]\.type: Invalid value 'x'"),
        ({"requests": [request(0, [1], out="many")]}, r":1: requests\[0\]\.out: Expected `int`"),
        ({"requests": [request(0, [1], **{"in": 0})]}, r":1: requests\[0\]\.in: must be at least 1"),
        ({"requests": [request(0, [1]), request(1, [-4])]}, r":1: requests\[1\]\.hash_ids: ids must lie"),
        ({"requests": [request(0, [1], api_time=-1)]}, r":1: requests\[0\]\.api_time: must be at least 0"),
        ({"requests": [{"type": "n", "t": 0, "model": "a", "in": 5}]}, r":1: requests\[0\]\.out is missing"),
        (
            {"requests": [request(0, [1]), subagent(1, [])]},
            r":1: requests\[1\]\.requests: a sub-agent that blocks",
        ),
        (
            {"requests": [request(0, [1]), subagent(1, [request(1, [5])], status="failed")]},
            r":1: requests\[1\]\.status: must be",
        ),
        (
            {
                "requests": [
                    request(0, [1]),
                    subagent(1, [request(1, [5], api_time=9)], duration_ms=10),
                    request(2, [1, 2]),
                ]
            },
            r":1: requests\[1\]: the sub-agent blocks, and its last request ends after",
        ),
    ],
)
def test_a_refusal_names_file_line_and_key(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match="traces.jsonl" + named):
        read(tmp_path, trace([request(0, [1])]) | change)


def test_two_traces_of_one_name_or_of_two_block_sizes_are_refused(tmp_path: Path) -> None:
    one = trace([request(0, [1])])
    with pytest.raises(InvalidArgument, match=r":2: id: 'one' is already in .*:1"):
        read(tmp_path, one, one)
    with pytest.raises(InvalidArgument, match=r":2: block_size: must be 64"):
        read(tmp_path, one, {**one, "id": "two", "block_size": 32})


def test_requests_of_a_trace_are_in_the_order_of_time(tmp_path: Path) -> None:
    workload = read(tmp_path, trace([request(4, [1, 2]), request(0, [1]), request(2, [1, 9])]))
    assert workload.graph is not None
    assert np.all(np.diff(workload.graph.not_before_ns) >= 0)
    assert workload.request_ids == ["one:outer:1", "one:outer:2", "one:outer:0"]

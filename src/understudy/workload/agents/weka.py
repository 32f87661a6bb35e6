"""Reader of Weka's traces of agents (AgentX): sessions with sub-agents, lowered to a graph.

A trace is a JSON object: a file of one, a file with one per line, or a folder of such files in path order.
docs/agents.md has the keys and the rules by which its requests become streams that wait for one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import msgspec
import numpy as np

from understudy._core import lower_weka, number_blocks
from understudy.errors import InvalidArgument
from understudy.workload.agents.lines import NO_IDS, fail, id_lists, read_records, trace_files
from understudy.workload.columns import Int32Column, Int64Column, column, offsets_of, ragged_positions
from understudy.workload.graph import RequestGraph
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_TOLERANCE_NS = 1_000
_MOST_SECONDS = 2**62 / 1e9


class _Request(msgspec.Struct, gc=False):
    t: float
    model: str
    input: int = msgspec.field(name="in")
    out: int
    hash_ids: msgspec.Raw = NO_IDS
    api_time: float | None = None


class _Normal(_Request, tag="n", gc=False):
    pass


class _Streamed(_Request, tag="s", gc=False):
    pass


class _Subagent(msgspec.Struct, tag="subagent", gc=False):
    t: float
    agent_id: str
    status: str
    requests: list[_Normal | _Streamed]
    duration_ms: float | None = None


class _Trace(msgspec.Struct, gc=False):
    id: str
    block_size: int
    requests: list[_Normal | _Streamed | _Subagent]
    hash_id_scope: str = "local"


_DECODER = msgspec.json.Decoder(_Trace)


@dataclass(slots=True)
class _Columns:
    """One trace in columns; requests of sub-agents stand at the place of their marker."""

    where: str
    name: str
    names: list[str]
    start_ns: Int64Column
    """Of nested requests: as in the file."""
    service_ns: Int64Column
    has_service: NDArray[np.bool_]
    models: list[str]
    prompt: Int64Column
    output: Int64Column
    scope: Int32Column
    id_counts: Int64Column
    ids: NDArray[np.uint64]
    marker_ns: Int64Column
    """Time of each sub-agent's marker, behind a 0 for the top level."""
    owner: Int64Column
    returned_ns: Int64Column
    sessions: list[str]
    """Name of the main stream of each scope."""


def read_weka(path: Path) -> Workload:
    """Read Weka traces and lower each to a play: docs/agents.md has the rules.

    Errors: InvalidArgument `FILE:LINE: KEY: …`.
    """
    traces: list[_Columns] = []
    known: dict[str, str] = {}
    block_size = 0
    for file in trace_files(path, (".json", ".jsonl")):
        for where, trace in read_records(file, _DECODER):
            if trace.id in known:
                fail(where, "id", f"{trace.id!r} is already in {known[trace.id]}; give each trace its own")
            known[trace.id] = where
            if trace.block_size < 1 or trace.block_size >= 2**30:
                fail(where, "block_size", f"must be at least 1 and below 2^30, got {trace.block_size}")
            if block_size and trace.block_size != block_size:
                fail(
                    where,
                    "block_size",
                    f"must be {block_size}, that of the traces before, got {trace.block_size}",
                )
            block_size = trace.block_size
            if trace.hash_id_scope != "local":
                fail(where, "hash_id_scope", f'must be "local", got {trace.hash_id_scope!r}')
            traces.append(_Flat(trace, where).columns())
    if not traces:
        raise InvalidArgument(f"{path}: no trace; give a file with a JSON object per line")
    return _join(traces, block_size)


class _Flat:
    """Collects the requests of one trace; checks every value."""

    def __init__(self, trace: _Trace, where: str) -> None:
        self._trace = trace
        self._where = where
        self._requests: list[_Request] = []
        self._keys: list[str] = []
        self._names: list[str] = []
        self._scope: list[int] = []

    def columns(self) -> _Columns:
        trace, where = self._trace, self._where
        markers, owners, returned = [0], list[int](), list[int]()
        sessions = ["root"]
        last = -1
        for index, request in enumerate(trace.requests):
            if isinstance(request, _Request):
                last = len(self._requests)
                self._add(request, f"requests[{index}]", f"outer:{index}", 0)
                continue
            key = f"requests[{index}]"
            markers.append(self._time(request.t, f"{key}.t"))
            owners.append(last)
            returned.append(self._returned_ns(request, key, markers[-1]))
            sessions.append(f"subagent:{index}:{request.agent_id}")
            for number, nested in enumerate(request.requests):
                self._add(
                    nested, f"{key}.requests[{number}]", f"outer:{index}:inner:{number}", len(sessions) - 1
                )
        if not self._requests:
            fail(where, "requests", "the trace has none; leave it out")
        counts, ids = id_lists(
            [request.hash_ids for request in self._requests],
            lambda row: (where, f"{self._keys[row]}.hash_ids"),
        )
        service_ns = [
            0 if request.api_time is None else self._time(request.api_time, f"{key}.api_time")
            for request, key in zip(self._requests, self._keys, strict=True)
        ]
        bad = next((row for row, time_ns in enumerate(service_ns) if time_ns < 0), None)
        if bad is not None:
            fail(
                where,
                f"{self._keys[bad]}.api_time",
                f"must be at least 0, got {self._requests[bad].api_time}",
            )
        return _Columns(
            where=where,
            name=trace.id,
            names=self._names,
            start_ns=np.array(
                [
                    self._time(request.t, f"{key}.t")
                    for request, key in zip(self._requests, self._keys, strict=True)
                ],
                np.int64,
            ),
            service_ns=np.array(service_ns, np.int64),
            has_service=np.array([request.api_time is not None for request in self._requests]),
            models=[request.model for request in self._requests],
            prompt=np.array([request.input for request in self._requests], np.int64),
            output=np.array([request.out for request in self._requests], np.int64),
            scope=np.array(self._scope, np.int32),
            id_counts=counts,
            ids=ids,
            marker_ns=np.array(markers, np.int64),
            owner=np.array(owners, np.int64),
            returned_ns=np.array(returned, np.int64),
            sessions=sessions,
        )

    def _add(self, request: _Request, key: str, name: str, scope: int) -> None:
        if not 1 <= request.input < 2**31:
            fail(self._where, f"{key}.in", f"must be at least 1 and below 2^31, got {request.input}")
        if not 0 <= request.out < 2**31:
            fail(self._where, f"{key}.out", f"must be at least 0 and below 2^31, got {request.out}")
        self._requests.append(request)
        self._keys.append(key)
        self._names.append(name)
        self._scope.append(scope)

    def _time(self, seconds: float, key: str) -> int:
        if not math.isfinite(seconds) or abs(seconds) > _MOST_SECONDS:
            fail(self._where, key, f"must be a number of seconds below {_MOST_SECONDS:.3g}, got {seconds}")
        return round(seconds * 1e9)

    def _returned_ns(self, request: _Subagent, key: str, marker_ns: int) -> int:
        """Return when a blocking sub-agent returned; −1: with its last request, −2: it runs in the background."""
        if request.status == "async_launched":
            return -2
        if request.status != "completed":
            fail(
                self._where,
                f"{key}.status",
                f'must be "completed" or "async_launched", got {request.status!r}',
            )
        if not request.requests:
            fail(self._where, f"{key}.requests", "a sub-agent that blocks needs requests; leave it out")
        if request.duration_ms is None:
            return -1
        duration_ns = self._time(request.duration_ms / 1e3, f"{key}.duration_ms")
        if duration_ns < 0:
            fail(self._where, f"{key}.duration_ms", f"must be at least 0, got {request.duration_ms}")
        return max(0, marker_ns + round(request.duration_ms * 1e6))


def _join(traces: list[_Columns], block_size: int) -> Workload:
    """Lower each trace, and join their columns."""
    relative = any(_has_early_nested(trace) for trace in traces)
    lowered = [_Lowered(trace, relative, block_size) for trace in traces]
    rows = np.cumsum([0, *(len(trace.names) for trace in traces)])
    names = tuple(dict.fromkeys(name for trace in traces for name in trace.models))
    place = {name: at for at, name in enumerate(names)}
    hash_ids, first = [], 0
    for each in lowered:
        numbers = each.number_blocks(first)
        if len(numbers):
            first = int(numbers.max()) + 1
        hash_ids.append(column("hash_ids", numbers, np.uint32))
    sessions = np.cumsum([0, *(each.sessions for each in lowered)])
    return Workload(
        arrival_ns=np.zeros(rows[-1], np.int64),
        prompt_tokens=np.concatenate([each.prompt for each in lowered]),
        output_tokens=np.concatenate([each.output for each in lowered]),
        hash_offsets=offsets_of(np.concatenate([-(-each.prompt // block_size) for each in lowered])),
        hash_ids=np.concatenate(hash_ids),
        trace_block_size=block_size,
        session=np.concatenate([each.session + base for each, base in zip(lowered, sessions, strict=False)]),
        turn=np.concatenate([each.turn for each in lowered]),
        request_ids=[name for each in lowered for name in each.request_ids],
        session_ids=[name for each in lowered for name in each.session_ids],
        graph=RequestGraph(
            play=np.repeat(np.arange(len(lowered), dtype=np.int32), np.diff(rows)),
            not_before_ns=np.concatenate([each.not_before_ns for each in lowered]),
            dependency_offsets=offsets_of(np.concatenate([each.edge_counts for each in lowered])),
            dependency_rows=np.concatenate(
                [each.on + base for each, base in zip(lowered, rows, strict=False)]
            ),
            dependency_triggers=np.concatenate([each.triggers for each in lowered]),
            dependency_delay_ns=np.concatenate([each.delays for each in lowered]),
            dependency_relations=np.concatenate([each.relations for each in lowered]),
            play_ids=[trace.name for trace in traces],
            model=np.array([place[name] for each in lowered for name in each.models], np.int32),
            models=names,
            recorded_service_ns=np.concatenate([each.service_ns for each in lowered]),
        ),
    )


def _has_early_nested(trace: _Columns) -> bool:
    """Whether a nested time lies before its marker, so that such times count from the marker."""
    nested = trace.scope > 0
    return bool((trace.start_ns[nested] < trace.marker_ns[trace.scope[nested]] - _TOLERANCE_NS).any())


class _Lowered:
    """One trace as a graph; rows in the order of the workload, and rows of dependencies within the trace."""

    def __init__(self, trace: _Columns, relative: bool, block_size: int) -> None:
        marker_ns = trace.marker_ns[trace.scope]
        if relative:
            start_ns = trace.start_ns + marker_ns
        else:
            start_ns = np.where(trace.scope > 0, np.maximum(trace.start_ns, marker_ns), trace.start_ns)
        models = {name: at for at, name in enumerate(dict.fromkeys(trace.models))}
        id_offsets = offsets_of(trace.id_counts)
        order, stream, offsets, on, triggers, delays, relations, early = lower_weka(
            start_ns,
            start_ns + trace.service_ns,
            np.array([models[name] for name in trace.models], np.int32),
            trace.output,
            trace.scope,
            id_offsets,
            trace.ids,
            trace.owner,
            trace.returned_ns,
        )
        if early >= 0:
            self._fail_join(trace, early)
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        counts = np.diff(offsets)
        edges = ragged_positions(offsets[:-1][order], counts[order])
        self.order, self._trace, self._id_offsets, self._block_size = order, trace, id_offsets, block_size
        self.prompt, self.output = trace.prompt[order], trace.output[order]
        self.edge_counts, self.on = counts[order], place[on[edges]]
        self.triggers, self.delays, self.relations = triggers[edges], delays[edges], relations[edges]
        self.not_before_ns = (start_ns - start_ns.min())[order]
        self.models = [trace.models[row] for row in order]
        self.service_ns = np.where(trace.has_service, trace.service_ns, -1)[order]
        self.request_ids = [f"{trace.name}:{trace.names[row]}" for row in order]
        self._find_sessions(trace, stream)

    def number_blocks(self, first: int) -> NDArray[np.uint64]:
        """Return the block ids of all prompts, numbered from `first`."""
        trace = self._trace
        return number_blocks(self.order, self._id_offsets, trace.ids, trace.prompt, self._block_size, first)

    def _find_sessions(self, trace: _Columns, stream: Int32Column) -> None:
        known: dict[tuple[int, int], int] = {}
        turns: list[int] = []
        session, turn = [], []
        for row in self.order.tolist():
            number = known.setdefault((int(trace.scope[row]), int(stream[row])), len(turns))
            if number == len(turns):
                turns.append(0)
            session.append(number)
            turn.append(turns[number])
            turns[number] += 1
        self.sessions = len(turns)
        self.session, self.turn = np.array(session, np.int32), np.array(turn, np.int32)
        self.session_ids = [
            f"{trace.name}:{trace.sessions[scope]}" + (f":worker:{place - 1}" if place else "")
            for scope, place in known
        ]

    @staticmethod
    def _fail_join(trace: _Columns, agent: int) -> NoReturn:
        index = trace.sessions[agent + 1].split(":")[1]
        fail(
            trace.where,
            f"requests[{index}]",
            "the sub-agent blocks, and its last request ends after the request that it returned to began; "
            'correct duration_ms, or give the status "async_launched"',
        )

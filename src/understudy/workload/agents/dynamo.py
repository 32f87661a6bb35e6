"""Reader of Dynamo's request traces (`dynamo.request.trace.v1`): one event per line, in one file or several shards.

Requests without an agent's context are independent arrivals. With one, the requests of a session follow one another,
and sub-agents begin and return where the events of tools say. docs/agents.md has the keys and the rules.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from understudy.errors import InvalidArgument
from understudy.workload.agents.builder import Dependency, Node, build
from understudy.workload.agents.lines import NO_IDS, fail, id_lists, read_records, trace_files
from understudy.workload.columns import intern_ids, offsets_of
from understudy.workload.graph import COMPLETION, DISPATCH, JOIN, SEQUENCE, SPAWN
from understudy.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from understudy.workload.columns import Int64Column

SCHEMA = "dynamo.request.trace.v1"
_TOOL_ENDS = ("tool_end", "tool_error")
_SKIPPED = ("tool_start", "request_payload")


class _Replay(msgspec.Struct, gc=False):
    trace_block_size: int
    input_length: int
    input_sequence_hashes: msgspec.Raw = NO_IDS


class _Request(msgspec.Struct, gc=False):
    request_id: str
    model: str
    output_tokens: int
    replay: _Replay
    request_received_ms: float | None = None
    total_time_ms: float | None = None


class _Context(msgspec.Struct, gc=False):
    session_id: str
    parent_session_id: str | None = None


class _Claude(msgspec.Struct, gc=False):
    source_request_id: str | None = None
    consumer_request_id: str | None = None
    child_session_id: str | None = None
    execution_mode: Literal["blocking", "background"] = "blocking"


class _Tool(msgspec.Struct, gc=False):
    claude: _Claude | None = None


class _Event(msgspec.Struct, gc=False):
    event: _Event | None = None
    schema: str | None = None
    event_type: str | None = None
    event_time_unix_ms: float | None = None
    request: _Request | None = None
    agent_context: _Context | None = None
    tool: _Tool | None = None


_DECODER = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class _Ended:
    """A request that ended, with recorded times."""

    where: str
    request: _Request
    context: _Context | None
    start_ns: int
    end_ns: int
    place: int = 0

    @property
    def order(self) -> tuple[int, int, str]:
        return self.start_ns, self.end_ns, self.request.request_id


@dataclass(slots=True)
class _Call:
    """A tool call that ran a sub-agent."""

    session: str | None
    claude: _Claude


def read_dynamo(path: Path) -> Workload:
    """Read Dynamo's request traces: a file, or a folder of shards.

    Errors: InvalidArgument `FILE:LINE: KEY: …`.
    """
    ended, calls = _read_events(path)
    if not ended:
        raise InvalidArgument(f"{path}: no request_end; give a trace of requests that ended")
    block_size = ended[0].request.replay.trace_block_size
    for one in ended:
        _check_request(one, block_size)
    ended.sort(key=lambda one: one.order)
    for place, one in enumerate(ended):
        one.place = place
    counts, ids = _block_ids(ended, block_size)
    if ended[0].context is None:
        return _independent(ended, counts, ids, block_size)
    return _Sessions(ended, calls).workload(counts, ids, block_size)


def _read_events(path: Path) -> tuple[list[_Ended], list[_Call]]:
    ended: list[_Ended] = []
    calls: list[_Call] = []
    known: dict[str, str] = {}
    for file in trace_files(path, (".jsonl",)):
        for where, line in read_records(file, _DECODER):
            event = line if line.event is None else line.event
            if event.schema != SCHEMA:
                fail(where, "schema", f'must be "{SCHEMA}", got {event.schema!r}')
            if event.event_type == "request_end":
                one = _read_request(event, where)
                if one.request.request_id in known:
                    fail(
                        where,
                        "request.request_id",
                        f"{one.request.request_id!r} is already in {known[one.request.request_id]}",
                    )
                known[one.request.request_id] = where
                if ended and (one.context is None) != (ended[0].context is None):
                    other = "lacks one" if one.context else "has one"
                    fail(where, "agent_context", f"{ended[0].where} {other}; give all requests one, or none")
                ended.append(one)
            elif event.event_type in _TOOL_ENDS:
                if event.tool is None:
                    fail(where, "tool", "is missing")
                if event.tool.claude is not None and event.tool.claude.child_session_id is not None:
                    session = None if event.agent_context is None else event.agent_context.session_id
                    calls.append(_Call(session, event.tool.claude))
            elif event.event_type not in _SKIPPED:
                known_types = ("request_end", *_TOOL_ENDS, *_SKIPPED)
                fail(
                    where, "event_type", f"must be one of {', '.join(known_types)}, got {event.event_type!r}"
                )
    return ended, calls


def _read_request(event: _Event, where: str) -> _Ended:
    request = event.request
    if request is None:
        fail(where, "request", "is missing")
    if event.event_time_unix_ms is None:
        fail(where, "event_time_unix_ms", "is missing")
    event_ns = _to_ns(event.event_time_unix_ms, where, "event_time_unix_ms")
    total_ns = None
    if request.total_time_ms is not None:
        total_ns = _to_ns(request.total_time_ms, where, "request.total_time_ms")
    if request.request_received_ms is not None:
        start_ns = _to_ns(request.request_received_ms, where, "request.request_received_ms")
    else:
        start_ns = max(0, event_ns - (total_ns or 0))
    end_ns = event_ns if total_ns is None else start_ns + total_ns
    return _Ended(where, request, event.agent_context, start_ns, end_ns)


def _check_request(one: _Ended, block_size: int) -> None:
    replay, where = one.request.replay, one.where
    if not 1 <= replay.trace_block_size < 2**30:
        fail(where, "request.replay.trace_block_size", f"must be at least 1, got {replay.trace_block_size}")
    if replay.trace_block_size != block_size:
        fail(
            where,
            "request.replay.trace_block_size",
            f"must be {block_size}, that of the requests before, got {replay.trace_block_size}",
        )
    if not 1 <= replay.input_length < 2**31:
        fail(
            where,
            "request.replay.input_length",
            f"must be at least 1 and below 2^31, got {replay.input_length}",
        )
    if not 0 <= one.request.output_tokens < 2**31:
        fail(
            where,
            "request.output_tokens",
            f"must be at least 0 and below 2^31, got {one.request.output_tokens}",
        )


def _to_ns(milliseconds: float, where: str, key: str) -> int:
    if not math.isfinite(milliseconds) or not 0 <= milliseconds < 2**62 / 1e6:
        fail(where, key, f"must be at least 0 ms and below 2^62 ns, got {milliseconds}")
    whole = math.floor(milliseconds)
    return whole * 1_000_000 + round((milliseconds - whole) * 1e6)


def _block_ids(ended: Sequence[_Ended], block_size: int) -> tuple[Int64Column, NDArray[np.uint64]]:
    """Return the ids of each prompt's blocks; a partly filled last block without a hash belongs to its request."""
    counts, hashes = id_lists(
        [one.request.replay.input_sequence_hashes for one in ended],
        lambda row: (ended[row].where, "request.replay.input_sequence_hashes"),
    )
    prompt = np.array([one.request.replay.input_length for one in ended], np.int64)
    blocks = -(-prompt // block_size)
    for row in np.flatnonzero((counts != blocks) & (counts != prompt // block_size)).tolist():
        fail(
            ended[row].where,
            "request.replay.input_sequence_hashes",
            f"an input_length of {prompt[row]} has {blocks[row]} blocks of {block_size} tokens, got {counts[row]}",
        )
    shared = intern_ids(hashes).astype(np.uint64)
    first = int(shared.max()) + 1 if len(shared) else 0
    lacking = np.flatnonzero(counts < blocks)
    own = np.arange(first, first + len(lacking), dtype=np.uint64)
    return blocks, np.insert(shared, offsets_of(counts)[1:][lacking], own)


def _independent(
    ended: Sequence[_Ended], counts: Int64Column, ids: NDArray[np.uint64], block_size: int
) -> Workload:
    starts = np.array([one.start_ns for one in ended], np.int64)
    return Workload(
        arrival_ns=starts - starts.min(),
        prompt_tokens=np.array([one.request.replay.input_length for one in ended], np.int64),
        output_tokens=np.array([one.request.output_tokens for one in ended], np.int64),
        hash_offsets=offsets_of(counts),
        hash_ids=intern_ids(ids),
        trace_block_size=block_size,
        request_ids=[one.request.request_id for one in ended],
    )


class _Sessions:
    """Sessions of agents, and how they begin and return."""

    def __init__(self, ended: Sequence[_Ended], calls: Sequence[_Call]) -> None:
        self._ended = ended
        self._calls = calls
        self._by_id = {one.request.request_id: one for one in ended}
        self._turns: dict[str, list[_Ended]] = {}
        for one in ended:
            self._turns.setdefault(self._session(one), []).append(one)
        self._edges: list[list[Dependency]] = [[] for _ in ended]
        self._unknown = 0

    @staticmethod
    def _session(one: _Ended) -> str:
        assert one.context is not None
        return one.context.session_id

    def workload(self, counts: Int64Column, ids: NDArray[np.uint64], block_size: int) -> Workload:
        """Link the requests, and build the plays that are linked."""
        for turns in self._turns.values():
            for before, one in pairwise(turns):
                self._depend(one, before, COMPLETION, one.start_ns - before.end_ns, SEQUENCE)
        called = {call.claude.child_session_id: call for call in self._calls}
        for session, turns in self._turns.items():
            self._attach(session, turns, called.get(session))
        plays = self._name_plays()
        first_ns = min(one.start_ns for one in self._ended)
        nodes = [
            Node(
                where=one.where,
                request_id=one.request.request_id,
                play_id=plays[one.place],
                session_id=self._session(one),
                model=one.request.model,
                prompt_tokens=one.request.replay.input_length,
                output_tokens=one.request.output_tokens,
                not_before_ns=0 if self._edges[one.place] else one.start_ns - first_ns,
                dependencies=self._edges[one.place],
                recorded_service_ns=-1 if one.request.total_time_ms is None else one.end_ns - one.start_ns,
            )
            for one in self._ended
        ]
        notes: tuple[str, ...] = ()
        if self._unknown:
            notes = (
                f"{self._unknown:,} sub-agents name a request that is not in the trace; they begin and return by the "
                "recorded times",
            )
        return build(nodes, counts, ids, block_size, notes)

    def _attach(self, session: str, turns: list[_Ended], call: _Call | None) -> None:
        """Let a sub-agent's session begin with its parent's request, and a later one of these wait for its end."""
        first = turns[0]
        assert first.context is not None
        parent = first.context.parent_session_id or (None if call is None else call.session)
        parents = self._turns.get(parent, []) if parent is not None and parent != session else []
        source = self._named(None if call is None else call.claude.source_request_id)
        if source is None and parents:
            started = bisect_right(parents, first.start_ns, key=lambda one: one.start_ns)
            source = parents[started - 1] if started else None
        if source is not None:
            self._depend(first, source, DISPATCH, first.start_ns - source.start_ns, SPAWN)
        last = max(turns, key=lambda one: (one.end_ns, *one.order))
        consumer = self._named(None if call is None else call.claude.consumer_request_id)
        if consumer is None and (call is None or call.claude.execution_mode == "blocking"):
            consumer = next((one for one in parents if one.start_ns > last.end_ns), None)
        if consumer is not None:
            self._depend(consumer, last, COMPLETION, consumer.start_ns - last.end_ns, JOIN)

    def _named(self, request_id: str | None) -> _Ended | None:
        if request_id is None:
            return None
        found = self._by_id.get(request_id)
        self._unknown += found is None
        return found

    def _depend(self, one: _Ended, on: _Ended, trigger: int, delay_ns: int, relation: int) -> None:
        self._edges[one.place].append(Dependency(on.place, trigger, max(0, delay_ns), relation))

    def _name_plays(self) -> list[str]:
        """Name the play of each request after the first of its requests."""
        root = list(range(len(self._ended)))

        def find(place: int) -> int:
            while root[place] != place:
                root[place] = root[root[place]]
                place = root[place]
            return place

        for place, edges in enumerate(self._edges):
            for edge in edges:
                one, other = sorted((find(place), find(edge.on)))
                root[other] = one
        return [f"dynamo-play:{self._ended[find(place)].request.request_id}" for place in range(len(root))]

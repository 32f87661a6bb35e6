"""Plays for a benchmark of a given duration: a snapshot of running plays, requests that warm up, and fresh copies.

docs/agents.md has the rules: they are those of AgentX benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.errors import ConfigError
from understudy.workload.columns import column, offsets_of, take_ragged
from understudy.workload.graph import COMPLETION, REPLAY_BARRIER, SEQUENCE, RequestGraph

if TYPE_CHECKING:
    from understudy.workload.columns import Int64Column
    from understudy.workload.workload import Workload

WARM_UP_REQUESTS = 10
"""Requests of each lane that repeat prompts of its snapshot, after one per live session."""


@dataclass(frozen=True, eq=False, slots=True)
class Profile:
    """A workload that begins with plays which prepare the caches."""

    workload: Workload
    preparing_plays: int
    prepared_rows: int
    """Its first rows: those of these plays."""
    source: Int64Column
    """Row of the given workload for each of its rows."""


class _Rows:
    """Rows in the making: each is a copy of a source row."""

    def __init__(self, workload: Workload, graph: RequestGraph) -> None:
        self._workload, self._graph = workload, graph
        self._names = workload.request_ids or [f"request_{row}" for row in range(len(workload))]
        self._plays = graph.play_ids or [f"play_{play}" for play in range(graph.plays)]
        self._sessions = workload.session_ids or [f"session_{number}" for number in range(workload.sessions)]
        self._mark = "#"
        while any(self._mark in name for name in (*self._names, *self._plays, *self._sessions)):
            self._mark += "#"  # copies of users have such names too
        self.source: list[int] = []
        self.copy: list[int] = []
        self.play: list[int] = []
        self.session: list[int] = []
        self.turn: list[int] = []
        self.floors: list[int] = []
        self.edges: list[list[tuple[int, int, int, int]]] = []
        self.request_ids: list[str] = []
        self.play_ids: list[str] = []
        self.session_ids: list[str] = []
        self._turns: list[int] = []

    def add_chain(self, play: int, rows: list[int], primers: int) -> None:
        """Add a play that sends prompts of these rows one after the other."""
        self.play_ids.append(f"{self._plays[play]}:preparation")
        session = self._add_session(f"{self._plays[play]}:preparation")
        for place, row in enumerate(rows):
            kind = f"primer:{place}" if place < primers else f"warm-up:{place - primers}"
            edges = [(len(self.source) - 1, COMPLETION, 0, SEQUENCE)] if place else []
            self._add(row, 0, session, 0, edges, f"{self._plays[play]}:{kind}")

    def add_play(self, play: int, rows: list[int], copy: int, floors: dict[int, int] | None = None) -> None:
        """Add a play with these rows. `floors`: earliest times of some, in place of the graph's own."""
        mark = f"{self._mark}{copy}" if copy else ""
        self.play_ids.append(self._plays[play] + mark)
        graph, session_of = self._graph, self._workload.session
        sessions: dict[int, int] = {}
        places = {row: len(self.source) + place for place, row in enumerate(rows)}
        for row in rows:
            own = int(session_of[row])
            if own not in sessions:
                sessions[own] = self._add_session(self._sessions[own] + mark)
            edges = []
            for at in range(int(graph.dependency_offsets[row]), int(graph.dependency_offsets[row + 1])):
                on = places.get(int(graph.dependency_rows[at]))
                if on is None:
                    continue  # history
                edges.append(
                    (
                        on,
                        int(graph.dependency_triggers[at]),
                        int(graph.dependency_delay_ns[at]),
                        int(graph.dependency_relations[at]),
                    )
                )
            floor = int(graph.not_before_ns[row]) if floors is None else floors[row]
            self._add(row, copy, sessions[own], floor, edges, self._names[row] + mark)

    def _add_session(self, name: str) -> int:
        self.session_ids.append(name)
        self._turns.append(0)
        return len(self._turns) - 1

    def _add(
        self,
        row: int,
        copy: int,
        session: int,
        floor: int,
        edges: list[tuple[int, int, int, int]],
        name: str,
    ) -> None:
        self.source.append(row)
        self.copy.append(copy)
        self.play.append(len(self.play_ids) - 1)
        self.session.append(session)
        self.turn.append(self._turns[session])
        self._turns[session] += 1
        self.floors.append(floor)
        self.edges.append(edges)
        self.request_ids.append(name)

    def build(self, prepared: int) -> Workload:
        """Build the workload; the first `prepared` rows have one token of output."""
        workload = self._workload
        index = np.array(self.source, np.int64)
        hash_offsets, hash_ids = take_ragged(workload.hash_offsets, workload.hash_ids, index)
        space = workload.token_space
        shift = np.array(self.copy, np.int64) * space
        if int(shift.max(initial=0)) + space >= 2**32:
            raise ConfigError(
                f"duration: {max(self.copy) + 1:,} copies of the plays have more than 2^32 blocks; give a shorter one"
            )
        hash_ids = column("hash_ids", hash_ids + np.repeat(shift, np.diff(hash_offsets)), np.uint32)
        output_tokens = workload.output_tokens[index].copy()
        output_tokens[:prepared] = 1
        edges = [edge for own in self.edges for edge in own]
        graph = self._graph
        optional: dict[str, Any] = {
            name: None if (values := getattr(workload, name)) is None else values[index]
            for name in ("max_tokens", "queue_order", "strict_priority", "policy_class", "adapter")
        }
        return replace(
            workload,
            arrival_ns=np.zeros(len(index), np.int64),
            prompt_tokens=workload.prompt_tokens[index],
            output_tokens=output_tokens,
            hash_offsets=hash_offsets,
            hash_ids=hash_ids,
            session=np.array(self.session, np.int32),
            turn=np.array(self.turn, np.int32),
            delay_ns=np.zeros(len(index), np.int64),
            priority=workload.priority[index],
            elapsed_ns=None,
            output_token_offsets=None,
            output_token_ids=None,
            output_in_next=None,
            request_ids=self.request_ids,
            session_ids=self.session_ids,
            **optional,
            graph=RequestGraph(
                play=np.array(self.play, np.int32),
                not_before_ns=np.array(self.floors, np.int64),
                dependency_offsets=offsets_of(np.array([len(own) for own in self.edges], np.int64)),
                dependency_rows=np.array([edge[0] for edge in edges], np.int64),
                dependency_triggers=np.array([edge[1] for edge in edges], np.uint8),
                dependency_delay_ns=np.array([edge[2] for edge in edges], np.int64),
                dependency_relations=np.array([edge[3] for edge in edges], np.uint8),
                play_ids=self.play_ids,
                model=None if graph.model is None else graph.model[index],
                models=graph.models,
            ),
        )


def make_profile(
    workload: Workload, *, lanes: int, warm_up: bool, client_clock: bool, copies: int, seed: int
) -> Profile:
    """Return the plays of a benchmark: `copies` times all plays, each copy with blocks of its own.

    With `warm_up`, the first plays, one per lane, are cut at a random time of their middle half; what lies before is
    history. Errors: ConfigError if the trace has no recorded times to cut at.
    """
    graph = workload.graph
    assert graph is not None
    for name in ("accepted_drafts", "abort_after_ns"):
        if getattr(workload, name) is not None:
            raise ConfigError(f"duration, warm_up: {name} of a trace is not supported there; leave it out")
    order = np.argsort(graph.play, kind="stable")
    plays = [part.tolist() for part in np.split(order, np.flatnonzero(np.diff(graph.play[order])) + 1)]
    made = _Rows(workload, graph.without_floors() if client_clock else graph)
    cuts: list[tuple[int, list[int], dict[int, int]]] = []
    lanes = min(lanes, len(plays))
    if warm_up:
        _check_recorded(graph)
        random = np.random.default_rng(seed)
        for play in range(lanes):
            cut_ns = _choose_cut(graph, plays[play], float(random.random()))
            primers, repeated, left, floors = _cut(workload, graph, plays[play], cut_ns, client_clock)
            warm = [repeated[place % len(repeated)] for place in range(WARM_UP_REQUESTS)]
            made.add_chain(play, [*primers, *warm], len(primers))
            cuts.append((play, left, floors))
    prepared, preparing = len(made.source), len(made.play_ids)
    for play, left, floors in cuts:
        made.add_play(play, left, 0, floors)
    for copy in range(copies):
        for play in range(len(cuts) if copy == 0 else 0, len(plays)):
            made.add_play(play, plays[play], copy)
    return Profile(made.build(prepared), preparing, prepared, np.array(made.source, np.int64))


def _check_recorded(graph: RequestGraph) -> None:
    waits = np.diff(graph.dependency_offsets) > 0
    if waits.any() and not graph.not_before_ns[waits].any():
        raise ConfigError(
            "warm_up: requests of this trace that wait for others have no recorded times to cut plays at; leave it out"
        )


def _choose_cut(graph: RequestGraph, rows: list[int], unit: float) -> int:
    starts_ns = graph.not_before_ns[rows]
    first, last = int(starts_ns.min()), int(starts_ns.max())
    return first + round((0.25 + 0.5 * unit) * (last - first))


def _cut(
    workload: Workload, graph: RequestGraph, rows: list[int], cut_ns: int, client_clock: bool
) -> tuple[list[int], list[int], list[int], dict[int, int]]:
    """Cut a play: return its primers, the rows that warm up, the rows that are left, and their earliest times.

    A primer is the last request in the history of a session that goes on.
    """
    starts_ns = graph.not_before_ns
    history = {row for row in rows if starts_ns[row] < cut_ns}
    left = [row for row in rows if row not in history]
    live = dict.fromkeys(int(workload.session[row]) for row in left)
    latest: dict[int, int] = {}
    for row in sorted(history, key=lambda row: (int(starts_ns[row]), row)):
        latest[int(workload.session[row])] = row
    primers = [latest[session] for session in live if session in latest]
    repeated = primers or [min(left, key=lambda row: (int(starts_ns[row]), row))]
    floors = {}
    for row in left:
        places = range(int(graph.dependency_offsets[row]), int(graph.dependency_offsets[row + 1]))
        was = [at for at in places if int(graph.dependency_rows[at]) in history]
        # What a request waited for in the history becomes a timer; a barrier has passed.
        timed = any(graph.dependency_relations[at] != REPLAY_BARRIER for at in was)
        waits = len(was) < len(places)
        floors[row] = max(0, int(starts_ns[row]) - cut_ns) if timed or not waits or not client_clock else 0
    return primers, repeated, left, floors

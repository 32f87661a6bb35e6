"""`RequestGraph`: requests that wait for others, in columns beside those of a workload."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from understudy.errors import InvalidArgument
from understudy.workload.columns import (
    Int32Column,
    Int64Column,
    RowError,
    check_offsets,
    column,
    first_row,
    intern_ids,
    offsets_of,
    ragged_positions,
    take_ragged,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

UInt8Column = NDArray[np.uint8]

TRIGGERS = ("dispatch", "completion")
"""Events of a request that others wait for: its arrival, and its last token. Values of `dependency_triggers`."""
RELATIONS = ("sequence", "spawn", "join", "replay_barrier")
"""Why a request waits: values of `dependency_relations`."""
DISPATCH, COMPLETION = range(2)
SEQUENCE, SPAWN, JOIN, REPLAY_BARRIER = range(4)


@dataclass(frozen=True, eq=False, kw_only=True)
class RequestGraph:
    """What each request of a workload waits for.

    A play is a set of requests that depend on one another, such as the work of one agent and its sub-agents. Request i
    arrives at the latest of these times: the start of its play plus `not_before_ns[i]`, and, for each of its
    dependencies, the trigger's time plus the delay.

    The constructor raises InvalidArgument or RowError, naming field and row, for inconsistent columns.
    """

    play: Int32Column
    """Play of each request; plays are numbered by first appearance."""
    not_before_ns: Int64Column
    """Earliest arrival after the start of the play, ≥ 0."""
    dependency_offsets: Int64Column
    """CSR offsets into the columns of dependencies, one more than there are requests."""
    dependency_rows: Int64Column
    """Row of the request that is waited for, of the same play."""
    dependency_triggers: UInt8Column
    """Which event of it: an index into `TRIGGERS`."""
    dependency_delay_ns: Int64Column
    """Time from the event to the arrival, ≥ 0."""
    dependency_relations: UInt8Column
    """Why: an index into `RELATIONS`."""
    play_ids: list[str] | None = None
    """Unique names of the plays, if the source has them."""
    model: Int32Column | None = None
    """Index into `models`, if the source names a model for each request."""
    models: tuple[str, ...] = ()
    """Names of models."""
    recorded_service_ns: Int64Column | None = None
    """Recorded time from each request's arrival to its last token, −1 where the source has none. No run reads it."""

    def __post_init__(self) -> None:
        rows = len(self.play)
        edges = len(self.dependency_rows)
        self._set("play", np.int32, rows)
        self._set("not_before_ns", np.int64, rows)
        self._set("dependency_offsets", np.int64, rows + 1)
        self._set("dependency_rows", np.int64, edges)
        self._set("dependency_triggers", np.uint8, edges)
        self._set("dependency_delay_ns", np.int64, edges)
        self._set("dependency_relations", np.uint8, edges)
        if self.model is not None:
            self._set("model", np.int32, rows)
        if self.recorded_service_ns is not None:
            self._set("recorded_service_ns", np.int64, rows)
        self._check()

    def _set(self, name: str, dtype: type[np.generic], rows: int) -> None:
        object.__setattr__(self, name, column(name, getattr(self, name), dtype, rows))

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.play)

    @property
    def plays(self) -> int:
        """Number of plays."""
        return int(self.play.max(initial=-1)) + 1

    @property
    def dependents(self) -> Int64Column:
        """Row that waits, for each dependency."""
        return np.repeat(np.arange(len(self)), np.diff(self.dependency_offsets))

    def dependencies(self, row: int) -> list[tuple[int, str, int, str]]:
        """Return the dependencies of a row: (row, trigger, delay in ns, relation)."""
        places = range(int(self.dependency_offsets[row]), int(self.dependency_offsets[row + 1]))
        return [
            (
                int(self.dependency_rows[at]),
                TRIGGERS[self.dependency_triggers[at]],
                int(self.dependency_delay_ns[at]),
                RELATIONS[self.dependency_relations[at]],
            )
            for at in places
        ]

    def without_floors(self) -> RequestGraph:
        """Return the graph in which only requests that wait for no other have earliest times."""
        waits = np.diff(self.dependency_offsets) > 0
        return replace(self, not_before_ns=np.where(waits, 0, self.not_before_ns))

    def delayed(self, outside_ns: int) -> RequestGraph:
        """Return the graph in which each completion is seen that much later."""
        late = self.dependency_triggers == COMPLETION
        return replace(self, dependency_delay_ns=self.dependency_delay_ns + outside_ns * late)

    def take(self, index: Int64Column) -> RequestGraph:
        """Keep these rows, in this order; plays are renumbered.

        Errors: InvalidArgument if a row that is kept depends on one that is not.
        """
        places = np.full(len(self), -1, np.int64)
        places[index] = np.arange(len(index))
        counts = np.diff(self.dependency_offsets)[index]
        edges = ragged_positions(self.dependency_offsets[:-1][index], counts)
        rows = places[self.dependency_rows[edges]]
        bad = first_row(rows < 0)
        if bad is not None:
            waiting = int(np.repeat(index, counts)[bad])
            raise InvalidArgument(
                f"row {waiting} waits for row {self.dependency_rows[edges][bad]}, which would be dropped; "
                "keep whole plays"
            )
        old_play = self.play[index]
        play_ids = self.play_ids
        if play_ids is not None:
            play_ids = [play_ids[play] for play in dict.fromkeys(old_play.tolist())]
        return replace(
            self,
            play=intern_ids(old_play).astype(np.int32),
            not_before_ns=self.not_before_ns[index],
            dependency_offsets=offsets_of(counts),
            dependency_rows=rows,
            dependency_triggers=self.dependency_triggers[edges],
            dependency_delay_ns=self.dependency_delay_ns[edges],
            dependency_relations=self.dependency_relations[edges],
            play_ids=play_ids,
            model=None if self.model is None else self.model[index],
            recorded_service_ns=(
                None if self.recorded_service_ns is None else self.recorded_service_ns[index]
            ),
        )

    def parent_sessions(self, session: Int32Column) -> Int32Column:
        """Return the session that started each session; −1 for none.

        It is that of the request for which the first request of a session waits, as a spawn or else in file order.
        """
        count = int(session.max(initial=-1)) + 1
        parents = np.full(count, -1, np.int32)
        _, firsts = np.unique(session, return_index=True)
        for own, row in enumerate(firsts.tolist()):
            for on, _, _, relation in self.dependencies(row):
                if session[on] == own or (parents[own] >= 0 and relation != "spawn"):
                    continue
                parents[own] = session[on]
                if relation == "spawn":
                    break
        return parents

    def columns(self) -> list[tuple[str, NDArray[np.generic]]]:
        """Return the arrays that a run reads, by name."""
        return [
            (each.name, value)
            for each in fields(self)
            if each.name != "recorded_service_ns"
            and isinstance(value := getattr(self, each.name), np.ndarray)
        ]

    def _check(self) -> None:
        _check_numbering(self.play)
        if self.play_ids is not None and len(self.play_ids) != self.plays:
            raise InvalidArgument(f"play_ids must have {self.plays} entries, got {len(self.play_ids)}")
        if self.play_ids is not None and len(set(self.play_ids)) < len(self.play_ids):
            raise InvalidArgument("play_ids must differ from one another")
        if self.model is not None:
            _fail_first(
                "model",
                (self.model < 0) | (self.model >= len(self.models)),
                f"must be an index below {len(self.models)}",
            )
        _fail_first("not_before_ns", self.not_before_ns < 0, "must be at least 0")
        if self.recorded_service_ns is not None:
            _fail_first("recorded_service_ns", self.recorded_service_ns < -1, "must be at least 0, or −1")
        check_offsets("dependency_offsets", self.dependency_offsets, len(self.dependency_rows))
        on = self.dependency_rows
        _fail_first(
            "dependency_rows", (on < 0) | (on >= len(self)), f"must be a row of the {len(self)} requests"
        )
        _fail_first("dependency_triggers", self.dependency_triggers >= len(TRIGGERS), "must be 0 or 1")
        _fail_first("dependency_relations", self.dependency_relations >= len(RELATIONS), "must be 0 … 3")
        _fail_first("dependency_delay_ns", self.dependency_delay_ns < 0, "must be at least 0")
        waiting = self.dependents
        _fail_first(
            "dependency_rows", self.play[on] != self.play[waiting], "must be a request of the same play"
        )
        row = find_cycle(waiting, on, len(self))
        if row is not None:
            raise RowError("dependency_rows", row, "waits for itself, over other requests")


def concat_graphs(parts: Sequence[RequestGraph]) -> RequestGraph:
    """Concatenate the graphs of workloads, row by row."""
    row_bases = np.cumsum([0, *map(len, parts)])
    edge_bases = np.cumsum([0, *(len(part.dependency_rows) for part in parts)])
    play_bases = np.cumsum([0, *(part.plays for part in parts)])
    names = tuple(dict.fromkeys(name for part in parts for name in part.models))
    place = {name: at for at, name in enumerate(names)}
    has_models = all(part.model is not None for part in parts)
    has_names = all(part.play_ids is not None for part in parts)
    return RequestGraph(
        play=np.concatenate([part.play + base for part, base in zip(parts, play_bases, strict=False)]),
        not_before_ns=np.concatenate([part.not_before_ns for part in parts]),
        dependency_offsets=np.concatenate(
            [np.zeros(1, np.int64)]
            + [part.dependency_offsets[1:] + base for part, base in zip(parts, edge_bases, strict=False)]
        ),
        dependency_rows=np.concatenate(
            [part.dependency_rows + base for part, base in zip(parts, row_bases, strict=False)]
        ),
        dependency_triggers=np.concatenate([part.dependency_triggers for part in parts]),
        dependency_delay_ns=np.concatenate([part.dependency_delay_ns for part in parts]),
        dependency_relations=np.concatenate([part.dependency_relations for part in parts]),
        play_ids=[name for part in parts for name in part.play_ids or ()] if has_names else None,
        model=np.concatenate(
            [
                np.array([place[name] for name in part.models], np.int32)[part.model]
                for part in parts
                if part.model is not None
            ]
        )
        if has_models
        else None,
        models=names if has_models else (),
        recorded_service_ns=_join_service([(len(part), part.recorded_service_ns) for part in parts]),
    )


def _join_service(parts: Sequence[tuple[int, Int64Column | None]]) -> Int64Column | None:
    """Join recorded times of workloads with so many requests; −1 for those of a workload without."""
    if all(given is None for _, given in parts):
        return None
    return np.concatenate([np.full(rows, -1, np.int64) if given is None else given for rows, given in parts])


def find_cycle(waiting: Int64Column, on: Int64Column, rows: int) -> int | None:
    """Return a row that waits for itself, directly or over others; None if there is none."""
    if bool((on < waiting).all()):
        return None
    left = np.bincount(waiting, minlength=rows)
    order = np.argsort(on, kind="stable")
    starts, dependents = offsets_of(np.bincount(on, minlength=rows)), waiting[order]
    ready = np.flatnonzero(left == 0)
    while len(ready):
        _, freed = take_ragged(starts, dependents, ready)
        np.subtract.at(left, freed, 1)
        candidates = np.unique(freed)
        ready = candidates[left[candidates] == 0]
    stuck = np.flatnonzero(left)
    return int(stuck[0]) if len(stuck) else None


def _check_numbering(play: Int32Column) -> None:
    """Raise unless plays are numbered 0, 1, 2, … by first appearance."""
    seen = np.maximum.accumulate(play) if len(play) else play
    expected = np.concatenate([[-1], seen[:-1]]) if len(play) else play
    _fail_first("play", (play < 0) | (play > expected + 1), "must number the plays by first appearance")


def _fail_first(field: str, bad: NDArray[np.bool_], reason: str) -> None:
    row = first_row(bad)
    if row is not None:
        raise RowError(field, row, reason)

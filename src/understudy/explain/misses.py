"""Why prompt tokens missed the cache: a cause for each, from the blocks that the workers had at the first admission."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy._core import Tier
from understudy.errors import InvalidArgument
from understudy.events.columns import EventKind
from understudy.run.step_columns import EventKind as StepEvent
from understudy.workload.identities import row_identities

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from understudy.run.kv_log import KvLog, PublishedRows
    from understudy.run.step_columns import StepColumns
    from understudy.run.timeline import Timeline
    from understudy.workload import Workload

CAUSES = {
    "never_computed": "no worker had computed it",
    "evicted": "its worker had it, and evicted it",
    "other_worker": "its worker never had it; another one has it",
    "evicted_elsewhere": "its worker never had it; others had it, and evicted it",
    "lower_tier": "below the GPU, and not loaded: too slow, or the load failed",
    "behind_gap": "cached, behind a block that is not",
    "group_tail": "cached by full attention; the tail of another cache group was gone",
    "recomputed": "cached; a hit leaves at least one token to compute (with EAGLE: a block)",
    "partial_block": "in the last block of the prompt, which is not full",
}
"""Causes, in the order of the codes in columns; of several that apply, the first of a block counts."""
_CODES = {name: code for code, name in enumerate(CAUSES)}
_AHEAD = 2
"""Steps whose blocks may have been taken at an admission and are published later: the running one and the next."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class MissColumns:
    """Missed prompt tokens of first admissions: a row per run of tokens of one request with one cause."""

    request: NDArray[np.int64]
    """Row of the workload, ascending."""
    cause: NDArray[np.uint8]
    """Index in `CAUSES`."""
    first: NDArray[np.int64]
    """First token of the run in the prompt."""
    tokens: NDArray[np.int64]
    at_ns: NDArray[np.int64]
    """Time at which these blocks were evicted from the worker; -1 for other causes."""
    by: NDArray[np.int64]
    """Request that needed the room; -1 where none is known. See docs/explain.md."""

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]], requests: int) -> MissColumns | None:
        """Read the columns by name; None without any. InvalidArgument where one is missing or has values no run has."""
        if not arrays:
            return None
        limits = {"request": requests, "cause": len(CAUSES), "by": requests}
        for name in (one.name for one in fields(cls)):
            column = arrays.get(name)
            if column is None or column.ndim != 1 or column.dtype.kind not in "iu":
                raise InvalidArgument(
                    f"column miss_{name} must be a list of whole numbers; save the run again"
                )
            least = -1 if name in ("at_ns", "by") else 0
            if column.size and (column.min() < least or column.max() >= limits.get(name, 2**62)):
                raise InvalidArgument(f"column miss_{name} has a value out of range; save the run again")
        if len({len(column) for column in arrays.values()}) > 1:
            raise InvalidArgument("columns miss_* have different lengths; save the run again")
        return cls(**{one.name: arrays[one.name] for one in fields(cls)})

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the columns by name."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def totals(self, rows: NDArray[np.bool_] | None = None) -> dict[str, int]:
        """Return missed tokens by cause, the most first; of some rows of these columns, or of all."""
        kept = slice(None) if rows is None else rows
        sums = np.bincount(self.cause[kept], weights=self.tokens[kept], minlength=len(CAUSES))
        found = {name: int(sums[code]) for code, name in enumerate(CAUSES) if sums[code]}
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def find_misses(workload: Workload, timeline: Timeline, log: KvLog, steps: StepColumns) -> MissColumns:
    """Find the cause of each prompt token that was not cached when its request was first admitted.

    The run must have kept its events, and its engines must publish blocks of `timeline.block_size` tokens.
    """
    state = _State(log, steps, timeline.num_workers)
    size = timeline.block_size
    found: list[tuple[int, int, int, int, int, int]] = []
    admitted = np.flatnonzero(steps.event_kind == StepEvent.ADMITTED)
    for at in admitted[np.argsort(steps.event_ns[admitted], kind="stable")].tolist():
        row, worker, now_ns = (
            int(column[at]) for column in (steps.event_request, steps.event_worker, steps.event_ns)
        )
        prompt, cached = int(timeline.prompt_tokens[row]), int(timeline.cached_tokens_first[row])
        state.advance(now_ns)
        whole = prompt // size
        names = row_identities(workload, row, size, whole).sequence_hashes.tolist()
        causes = list(state.explain(worker, names, cached // size, now_ns))
        if prompt > max(whole * size, cached):
            causes.append((_CODES["partial_block"], -1, -1))
        begin = cached
        for number, (code, evicted_ns, by) in enumerate(causes, cached // size):
            end = min((number + 1) * size, prompt)
            last = found[-1] if found else None
            if last is not None and last[0] == row and (last[1], last[4], last[5]) == (code, evicted_ns, by):
                found[-1] = (row, code, last[2], last[3] + end - begin, evicted_ns, by)
            else:
                found.append((row, code, begin, end - begin, evicted_ns, by))
            begin = end
    found.sort(key=lambda run: (run[0], run[2]))
    columns = np.array(found, dtype=np.int64).reshape(-1, 6).T
    return MissColumns(
        request=columns[0],
        cause=columns[1].astype(np.uint8),
        first=columns[2],
        tokens=columns[3],
        at_ns=columns[4],
        by=columns[5],
    )


class _State:
    """The blocks of all workers at a time, by the events that they have published."""

    def __init__(self, log: KvLog, steps: StepColumns, workers: int) -> None:
        self._steps = steps
        self._device: list[set[int]] = [set() for _ in range(workers)]
        self._below: list[defaultdict[int, int]] = [defaultdict(int) for _ in range(workers)]
        """By worker: tiers below its GPU that have a block."""
        self._evicted: list[dict[int, int]] = [{} for _ in range(workers)]
        """By worker: time at which a block last left its GPU."""
        self._holders: defaultdict[int, int] = defaultdict(int)
        """Workers that have a block on the GPU."""
        self._ever: set[int] = set()
        self._publishers = [_Published(rows) for rows in log.published()]
        self._first_step = np.searchsorted(steps.step_worker, np.arange(workers + 1))

    def advance(self, now_ns: int) -> None:
        """Apply all events up to a time."""
        for one in self._publishers:
            for kind, tier, name, time_ns in one.take(now_ns):
                for worker in one.workers:
                    self._apply(worker, kind, tier, name, time_ns)

    def _apply(self, worker: int, kind: int, tier: int, name: int, time_ns: int) -> None:
        if tier != Tier.G1:
            self._below[worker][name] += 1 if kind == EventKind.STORED else -1
            return
        device = self._device[worker]
        if kind == EventKind.STORED and name not in device:
            device.add(name)
            self._ever.add(name)
            self._holders[name] += 1
        elif kind == EventKind.REMOVED and name in device:
            device.remove(name)
            self._evicted[worker][name] = time_ns
            self._holders[name] -= 1

    def explain(
        self, worker: int, names: Sequence[int], hits: int, now_ns: int
    ) -> Iterator[tuple[int, int, int]]:
        """Yield cause, time of eviction and the request that needed the room, for each block behind the hits."""
        leaving = self._leaving(worker, now_ns) if hits < len(names) else {}
        has_gap = False
        for name in names[hits:]:
            is_here = name in self._device[worker]
            evicted_ns = leaving.get(name, -1) if is_here else -1
            if is_here and evicted_ns < 0:
                yield _CODES["behind_gap" if has_gap else self._rule(worker)], -1, -1
                continue
            has_gap = True
            if evicted_ns < 0:
                evicted_ns = self._evicted[worker].get(name, -1)
            if self._below[worker].get(name, 0) > 0:
                yield _CODES["lower_tier"], -1, -1
            elif evicted_ns >= 0:
                yield _CODES["evicted"], evicted_ns, self._needed_by(worker, evicted_ns)
            elif self._holders.get(name, 0) > 0:
                yield _CODES["other_worker"], -1, -1
            else:
                yield _CODES["evicted_elsewhere" if name in self._ever else "never_computed"], -1, -1

    def _rule(self, worker: int) -> str:
        return "group_tail" if self._publishers[worker].has_groups else "recomputed"

    def _leaving(self, worker: int, now_ns: int) -> dict[int, int]:
        """Return the blocks that running steps have taken from the GPU, with the time at which that is published."""
        steps = slice(self._first_step[worker], self._first_step[worker + 1])
        ends = self._steps.step_end_ns[steps]
        at = int(np.searchsorted(ends, now_ns, "right"))
        if at >= len(ends):
            return {}
        return self._publishers[worker].leaving(int(ends[min(at + _AHEAD, len(ends)) - 1]))

    def _needed_by(self, worker: int, time_ns: int) -> int:
        """Return the request with most prompt tokens in the step that ended then; -1: its steps decoded only."""
        first, last = self._first_step[worker], self._first_step[worker + 1]
        at = int(first + np.searchsorted(self._steps.step_end_ns[first:last], time_ns))
        if at >= last or self._steps.step_end_ns[at] != time_ns:
            return -1
        batch = self._steps.step_batch[at]
        begin, end = np.searchsorted(self._steps.entry_batch, [batch, batch + 1])
        prompts = np.flatnonzero(self._steps.entry_decodes[begin:end] == 0)
        if not len(prompts):
            return -1
        tokens = self._steps.entry_tokens[begin:end][prompts]
        return int(self._steps.entry_request[begin:end][prompts[int(tokens.argmax())]])


class _Published:
    """Events of one publisher in order; `workers` are those that can read its blocks."""

    def __init__(self, rows: PublishedRows) -> None:
        self.workers = rows.workers
        self.has_groups = rows.has_groups
        self._times: list[int] = rows.time_ns.tolist()
        self._kinds: list[int] = rows.kinds.tolist()
        self._tiers: list[int] = rows.tiers.tolist()
        self._names: list[int] = rows.sequence_hashes.tolist()
        self._at = 0

    def take(self, until_ns: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield kind, tier, name and time of the next events up to a time."""
        while self._at < len(self._times) and self._times[self._at] <= until_ns:
            at = self._at
            self._at += 1
            yield self._kinds[at], self._tiers[at], self._names[at], self._times[at]

    def leaving(self, until_ns: int) -> dict[int, int]:
        """Return the blocks that leave the GPU with the next events up to a time, and when."""
        found: dict[int, int] = {}
        at = self._at
        while at < len(self._times) and self._times[at] <= until_ns:
            if self._tiers[at] == Tier.G1 and self._kinds[at] == EventKind.REMOVED:
                found.setdefault(self._names[at], self._times[at])
            at += 1
        return found

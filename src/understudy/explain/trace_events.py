"""Tracks, slices, counters and flows of a run, independent of the format they are written in."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.run.step_columns import EventKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.explain.saved_run import SavedRun


@dataclass(slots=True)
class SliceTrack:
    """Slices of one track in time order, none of which overlap."""

    name: str
    process: int
    begin_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    names: NDArray[np.int64]
    """Index of each slice's name in `Trace.names`."""
    tokens: NDArray[np.int64] | None = None
    flows: list[tuple[int, int, bool]] = field(default_factory=list)
    """(slice, flow id, whether it ends there), in the order of slices."""


@dataclass(slots=True)
class CounterTrack:
    """Values of one counter in time order."""

    name: str
    process: int
    time_ns: NDArray[np.int64]
    values: NDArray[np.int64]


@dataclass(slots=True)
class Trace:
    """Processes with their tracks. A flow has the number of its request's row + 1."""

    processes: list[str]
    names: list[str]
    slices: list[SliceTrack]
    counters: list[CounterTrack]


def build_trace(run: SavedRun) -> Trace:
    """Convert a run: a process per worker, with steps, slots of running requests, counters; and links."""
    steps = run.steps
    workers = max(len(run.worker_blocks), int(steps.step_worker.max(initial=-1)) + 1)
    names = [run.name(row) for row in range(len(run))]
    trace = Trace([f"worker {worker}" for worker in range(workers)], names, [], [])
    bounds = np.searchsorted(steps.step_worker, np.arange(workers + 1)).tolist()
    runs = _running_intervals(run)
    is_last = _find_last_entries(run)
    for worker in range(workers):
        part = slice(bounds[worker], bounds[worker + 1])
        trace.slices.append(_step_track(run, worker, part, names, is_last))
        trace.slices += _slot_tracks(worker, runs[worker])
        begins = steps.step_begin_ns[part]
        for name, values in (
            ("running requests", steps.step_running),
            ("waiting requests", steps.step_waiting),
            ("KV blocks used", steps.step_active_blocks),
        ):
            trace.counters.append(CounterTrack(name, worker, begins, values[part].astype(np.int64)))
    if run.links:
        trace.processes.append("links")
    for link in run.links:
        moved = np.asarray(link["bytes"], np.float64)
        times = np.arange(len(moved) + 1, dtype=np.int64) * link["bucket_ns"]
        rates = np.append(moved / (link["bucket_ns"] / 1e9), 0.0)
        trace.counters.append(
            CounterTrack(f"{link['name']} (bytes/s)", workers, times, np.rint(rates).astype(np.int64))
        )
    return trace


def _find_last_entries(run: SavedRun) -> NDArray[np.bool_]:
    """Return a mask of the last entry of every request, on whichever worker it ended."""
    steps = run.steps
    begins = steps.step_begin_ns[np.searchsorted(steps.step_batch, steps.entry_batch)]
    order = np.lexsort((begins, steps.entry_request))
    is_last = np.zeros(len(order), bool)
    is_last[order] = np.diff(steps.entry_request[order], append=-1) != 0
    return is_last


def _step_track(
    run: SavedRun, worker: int, part: slice, names: list[str], is_last: NDArray[np.bool_]
) -> SliceTrack:
    """Name steps by their batch; flows lead from a request to the steps of its chunks and to its last step."""
    steps = run.steps
    batches = steps.step_batch[part]
    unique, inverse = np.unique(batches, return_inverse=True)
    low, high = (
        np.searchsorted(steps.entry_batch, unique),
        np.searchsorted(steps.entry_batch, unique, "right"),
    )
    decodes = np.append(0, np.cumsum(steps.entry_decodes, dtype=np.int64))
    tokens = np.append(0, np.cumsum(steps.entry_tokens, dtype=np.int64))
    counts = np.stack([high - low - (decodes[high] - decodes[low]), decodes[high] - decodes[low]], axis=1)
    kinds, of_batch = np.unique(counts, axis=0, return_inverse=True)
    first = len(names)
    names += [_name_step(*kind) for kind in kinds.tolist()]
    track = SliceTrack(
        "steps",
        worker,
        steps.step_begin_ns[part],
        steps.step_end_ns[part],
        first + of_batch.reshape(-1)[inverse.reshape(-1)],
        (tokens[high] - tokens[low])[inverse.reshape(-1)],
    )
    if not len(batches):
        return track
    entries = slice(int(low[0]), int(high[-1]))
    requests = steps.entry_request[entries]
    of_entry = steps.entry_batch[entries]
    chunks = steps.entry_decodes[entries] == 0
    last = is_last[entries]
    chosen = np.flatnonzero(chunks | last)
    at = np.where(
        last[chosen],
        np.searchsorted(batches, of_entry[chosen], "right") - 1,
        np.searchsorted(batches, of_entry[chosen], "left"),
    )
    order = np.argsort(at, kind="stable")
    track.flows = list(
        zip(
            at[order].tolist(),
            (requests[chosen][order] + 1).tolist(),
            last[chosen][order].tolist(),
            strict=True,
        )
    )
    return track


def _name_step(chunks: int, decodes: int) -> str:
    parts = [f"prefill {chunks}"] if chunks else []
    parts += [f"decode {decodes}"] if decodes else []
    return " + ".join(parts) or "empty"


def _running_intervals(run: SavedRun) -> list[list[tuple[int, int, int]]]:
    """Return (begin, end, request) of every stay in the running list, by worker."""
    steps = run.steps
    workers = max(len(run.worker_blocks), int(steps.step_worker.max(initial=-1)) + 1)
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(workers)]
    ended = run.served_ns - run.front_end_ns
    open_since: dict[int, tuple[int, int]] = {}

    def close(request: int, end_ns: int) -> None:
        begin, worker = open_since.pop(request)
        found[worker].append((begin, max(begin, end_ns), request))

    for time, worker, kind, request in zip(
        steps.event_ns.tolist(),
        steps.event_worker.tolist(),
        steps.event_kind.tolist(),
        steps.event_request.tolist(),
        strict=True,
    ):
        if request in open_since and kind != EventKind.ADMITTED:
            close(request, time)
        if kind in (EventKind.ADMITTED, EventKind.RESUMED):
            open_since[request] = (time, worker)
    last = int(steps.step_end_ns.max(initial=0))
    # A recorded window may begin after an admission: such a request is shown from its first step on.
    known = {request for of_worker in found for _, _, request in of_worker} | set(open_since)
    requests, first = np.unique(steps.entry_request, return_index=True)
    rows = np.searchsorted(steps.step_batch, steps.entry_batch[first])
    for request, row in zip(requests.tolist(), rows.tolist(), strict=True):
        if request not in known:
            open_since[request] = (int(steps.step_begin_ns[row]), int(steps.step_worker[row]))
    for request in list(open_since):
        close(request, int(ended[request]) if ended[request] >= 0 else last)
    return found


def _slot_tracks(worker: int, intervals: list[tuple[int, int, int]]) -> list[SliceTrack]:
    """Give every interval the lowest slot that is free."""
    slots: list[list[tuple[int, int, int]]] = []
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for interval in sorted(intervals):
        while busy and busy[0][0] <= interval[0]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot = len(slots)
            slots.append([])
        slots[slot].append(interval)
        heapq.heappush(busy, (interval[1], slot))
    tracks = []
    for number, kept in enumerate(slots):
        columns: Any = np.asarray(kept, np.int64).reshape(-1, 3)
        flows = [(at, request + 1, False) for at, (_, _, request) in enumerate(kept)]
        tracks.append(
            SliceTrack(
                f"slot {number}", worker, columns[:, 0], columns[:, 1], columns[:, 2].copy(), flows=flows
            )
        )
    return tracks

"""Compare two saved runs: settings, the first differing decision, and why latencies changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.errors import InvalidArgument
from understudy.explain.waterfall import PARTS, Waterfalls
from understudy.run.bootstrap import CONFIDENCE, divide_sessions, estimate_mean
from understudy.run.step_columns import EventKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.explain.saved_run import SavedRun

SCHEMA = "understudy.diff/1"
SETTINGS = (
    *("understudy", "workers", "data_parallel_size", "routing", "seed", "load", "scheduling", "engine"),
    *("tiers", "pools", "timing", "times", "max_tokens"),
)
"""Facts of a run that are compared as settings."""
MOST_SPLIT = 2_000
"""Requests whose latency is split into parts, those that changed most."""
_MISSING = "—"
# Order of decisions at one time: steps end, requests are placed, schedules preempt and admit, steps begin.
_STEP_END, _PLACED, _PREEMPTED, _ADMITTED, _STEP_BEGIN = range(5)
_RANK_OF_EVENT = {
    EventKind.PLACED: _PLACED,
    EventKind.ADMITTED: _ADMITTED,
    EventKind.RESUMED: _ADMITTED,
    EventKind.PREEMPTED: _PREEMPTED,
}


def compare_runs(a: SavedRun, b: SavedRun, most: int = 20) -> dict[str, Any]:
    """Compare two runs of one workload; `most` limits the listed requests.

    InvalidArgument where the runs served different workloads.
    """
    workloads = [run.run.get("workload_digest") for run in (a, b)]
    if len(a) != len(b) or workloads[0] != workloads[1]:
        raise InvalidArgument(
            f"B: the runs served different workloads ({len(a):,} and {len(b):,} requests, digests {workloads[0]} and "
            f"{workloads[1]}); replay the same trace with the same --max-tokens"
        )
    before, after = a.latency_ns, b.latency_ns
    both = np.flatnonzero((before >= 0) & (after >= 0))
    change = (after - before)[both]
    order = both[np.argsort(-np.abs(change), kind="stable")]
    order = order[(after - before)[order] != 0]
    split = order[:MOST_SPLIT]
    falls = Waterfalls(a), Waterfalls(b)
    causes = dict.fromkeys(PARTS, 0)
    requests: list[dict[str, Any]] = []
    for row in split.tolist():
        parts = _change_of_parts(falls, row)
        for part, value in parts.items():
            causes[part] += value
        if len(requests) < most:
            requests.append(_describe_request(a, b, row, parts))
    return {
        "schema": SCHEMA,
        "settings": _compare_settings(a.run, b.run),
        "first_difference": find_first_difference(a, b),
        "ended": {"a": int((before >= 0).sum()), "b": int((after >= 0).sum()), "both": len(both)},
        "latency_ns": {"a": int(before[both].sum()), "b": int(after[both].sum())},
        "mean_change": _estimate_change(a, both, change),
        "changed": len(order),
        "causes": {
            "requests": len(split),
            "change_ns": int((after - before)[split].sum()),
            "parts": {part: value for part, value in causes.items() if value},
        },
        "requests": requests,
        "part_names": PARTS,
    }


def _estimate_change(a: SavedRun, both: NDArray[np.intp], change: NDArray[np.int64]) -> dict[str, Any] | None:
    """Return the mean change of latencies with its confidence interval over sessions; None for few sessions."""
    sessions = a.requests.get("session")
    if sessions is None or not len(both):  # files of earlier versions have no sessions
        return None
    interval = estimate_mean(divide_sessions(sessions)[both], change / 1e6)
    if interval is None:
        return None
    low, high = interval
    return {
        "mean_ms": float(change.mean()) / 1e6,
        "low_ms": low,
        "high_ms": high,
        "confidence": CONFIDENCE,
        "above_noise": not low <= 0 <= high,
    }


def _compare_settings(a: Any, b: Any, name: str = "") -> list[dict[str, Any]]:
    """List the settings that differ, by their dotted names."""
    if not name:
        a, b = ({key: run[key] for key in SETTINGS if key in run} for run in (a, b))
    if isinstance(a, list) and isinstance(b, list):
        a, b = (dict(enumerate(values)) for values in (a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            one
            for key in dict.fromkeys([*a, *b])
            for one in _compare_settings(
                a.get(key, _MISSING), b.get(key, _MISSING), f"{name}.{key}" if name else str(key)
            )
        ]
    return [] if a == b else [{"name": name, "a": _shorten(a), "b": _shorten(b)}]


def _shorten(value: Any) -> Any:
    """Name settings that the other run has nothing to compare with."""
    if isinstance(value, dict):
        return value.get("kind") or value.get("name") or f"{len(value)} settings"
    return f"{len(value)} entries" if isinstance(value, list) else value


def _change_of_parts(falls: tuple[Waterfalls, Waterfalls], row: int) -> dict[str, int]:
    one, other = (fall.of(row) for fall in falls)
    assert one is not None
    assert other is not None
    before, after = one.parts, other.parts
    changes = {part: after.get(part, 0) - before.get(part, 0) for part in PARTS}
    return {part: value for part, value in changes.items() if value}


def _describe_request(a: SavedRun, b: SavedRun, row: int, parts: dict[str, int]) -> dict[str, Any]:
    before, after = int(a.latency_ns[row]), int(b.latency_ns[row])
    sign = 1 if after > before else -1
    return {
        "request": a.name(row),
        "row": row,
        "worker": {"a": int(a.requests["worker"][row]), "b": int(b.requests["worker"][row])},
        "latency_ns": {"a": before, "b": after},
        "change_ns": after - before,
        "cause": max(parts, key=lambda part: sign * parts[part]),
        "parts": parts,
    }


# ── The first differing decision ──


def find_first_difference(a: SavedRun, b: SavedRun) -> dict[str, Any] | None:
    """Return the first decision that differs, with its time and what each run did; None if all are equal."""
    one, other = _list_decisions(a), _list_decisions(b)
    count = min(len(one), len(other))
    equal = np.all(one[:count, :-1] == other[:count, :-1], axis=1)
    differing = np.flatnonzero(~equal)
    if len(differing):
        at = int(differing[0])
    elif len(one) == len(other):
        return None
    else:
        at = count
    said = [
        _describe_decision(run, rows[at]) if at < len(rows) else None for run, rows in ((a, one), (b, other))
    ]
    times = [one_said["time_ns"] for one_said in said if one_said is not None]
    return {"time_ns": min(times), "after_equal_decisions": at, "a": said[0], "b": said[1]}


def _list_decisions(run: SavedRun) -> NDArray[np.int64]:
    """List (time, rank, worker, request, value, row of its table) of every decision, in order."""
    steps = run.steps
    ranks = np.array([_RANK_OF_EVENT[kind] for kind in EventKind])[steps.event_kind]
    events = [steps.event_ns, ranks, steps.event_worker, steps.event_request, steps.event_cached]
    rows = np.arange(len(steps.step_begin_ns))
    signatures = _sign_batches(run)[steps.step_batch]
    no_request = np.full(len(rows), -1)
    tables = [
        np.stack([*events, np.arange(len(steps.event_ns))], axis=1),
        np.stack(
            [
                steps.step_begin_ns,
                no_request * 0 + _STEP_BEGIN,
                steps.step_worker,
                no_request,
                signatures,
                rows,
            ],
            axis=1,
        ),
        np.stack(
            [
                steps.step_end_ns,
                no_request * 0 + _STEP_END,
                steps.step_worker,
                no_request,
                steps.step_begin_ns,
                rows,
            ],
            axis=1,
        ),
    ]
    together = np.concatenate([table.astype(np.int64) for table in tables])
    return together[np.lexsort(together.T[3::-1])]


def _sign_batches(run: SavedRun) -> NDArray[np.int64]:
    """Return a number per batch that is equal for equal requests with equal tokens."""
    steps = run.steps
    mixed = steps.entry_request.astype(np.uint64) + np.uint64(1)
    for more in (steps.entry_tokens, steps.entry_decodes):
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0x9E3779B97F4A7C15) + more.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    sums = np.append(np.uint64(0), np.cumsum(mixed, dtype=np.uint64))
    count = int(steps.step_batch.max(initial=-1)) + 1
    bounds = np.searchsorted(steps.entry_batch, np.arange(count + 1))
    return (sums[bounds[1:]] - sums[bounds[:-1]]).view(np.int64)


def _describe_decision(run: SavedRun, decision: NDArray[np.int64]) -> dict[str, Any]:
    time, rank, worker, request, value, row = decision.tolist()
    steps = run.steps
    about: dict[str, Any] = {"time_ns": time, "worker": worker, "request": None}
    if request >= 0:
        about["request"] = run.name(request)
    match rank:
        case 0:
            lasted = (time - value) / 1e6
            return {**about, "kind": "step_end", "what": f"a step ended after {lasted:,.3f} ms"}
        case 1:
            what = f"request {about['request']} was sent to worker {worker}"
            return {**about, "kind": "placed", "what": what}
        case 2:
            by = int(steps.event_other[row])
            why = "" if by in (-1, request) else f", to make room for {run.name(by)}"
            return {**about, "kind": "preempted", "what": f"request {about['request']} was preempted{why}"}
        case 3:
            what = f"request {about['request']} was admitted with {value:,} cached tokens"
            return {**about, "kind": "admitted", "what": what}
    low, high = np.searchsorted(steps.entry_batch, [steps.step_batch[row], steps.step_batch[row] + 1])
    part = slice(int(low), int(high))
    chunks = steps.entry_decodes[part] == 0
    prompts = [run.name(one) for one in steps.entry_request[part][chunks].tolist()]
    said = []
    if prompts:
        tokens = int(steps.entry_tokens[part][chunks].sum())
        said.append(f"{tokens:,} prompt tokens of {', '.join(prompts[:5])}")
    if decodes := len(chunks) - len(prompts):
        said.append(f"{decodes} decodes")
    return {**about, "kind": "step_begin", "what": f"a step began with {' and '.join(said) or 'nothing'}"}

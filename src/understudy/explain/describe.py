"""Describe why requests were slow: the spans of one, or the parts of the slowest, as plain JSON values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.explain.describe_misses import describe_misses, list_misses
from understudy.explain.waterfall import PARTS, Span, Waterfalls
from understudy.run.step_columns import EventKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from understudy.explain.saved_run import SavedRun
    from understudy.explain.waterfall import Waterfall

SCHEMA = "understudy.explain/1"
MOST_NAMED = 5
"""Other requests that a span names at most."""


def explain_requests(
    run: SavedRun, rows: Sequence[int], *, spans: bool = True, misses: bool = False
) -> dict[str, Any]:
    """Explain these requests, and all of them together. Requests that did not end are left out.

    `misses`: also the causes of missed prompt tokens, of these requests and of the whole run.
    """
    waterfalls = Waterfalls(run)
    found = [waterfall for row in rows if (waterfall := waterfalls.of(row)) is not None]
    explained: dict[str, Any] = {
        "schema": SCHEMA,
        "run": run.run,
        "requests": [_describe_request(run, waterfall, spans=spans) for waterfall in found],
        "latency_ns": sum(waterfall.latency_ns for waterfall in found),
        "parts": add_parts(waterfall.parts for waterfall in found),
        "part_names": PARTS,
    }
    if misses:
        explained["misses"] = describe_misses(run)
        for about in explained["requests"]:
            about["misses"] = list_misses(run, about["row"])
    return explained


def add_parts(several: Iterable[dict[str, int]]) -> dict[str, int]:
    """Sum the parts of several latencies, in ns; parts of 0 are left out."""
    total = dict.fromkeys(PARTS, 0)
    for parts in several:
        for part, value in parts.items():
            total[part] += value
    return {part: value for part, value in total.items() if value}


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Merge consecutive spans of one kind on one worker; all waits in a queue are of one kind, named by the longest."""
    merged: list[Span] = []
    for span in spans:
        before = merged[-1] if merged else None
        if before is None or before.worker != span.worker or _family(before) != _family(span):
            merged.append(span)
            continue
        parts = add_parts([before.parts, span.parts])
        merged[-1] = Span(
            before.begin_ns,
            span.end_ns,
            max(parts, key=parts.__getitem__) if _family(span) == "wait" else span.kind,
            parts,
            span.worker,
            before.first_step if before.first_step >= 0 else span.first_step,
            span.last_step if span.last_step >= 0 else before.last_step,
            before.tokens + span.tokens,
        )
    return merged


def _family(span: Span) -> str:
    return "wait" if span.kind.startswith("wait") else span.kind


def _describe_request(run: SavedRun, waterfall: Waterfall, *, spans: bool) -> dict[str, Any]:
    row = waterfall.row
    columns = run.requests
    arrival = int(columns["arrival_ns"][row])
    token = int(columns["first_token_ns"][row])
    about: dict[str, Any] = {
        "request": run.name(row),
        "row": row,
        "worker": int(columns["worker"][row]),
        "arrival_ns": arrival,
        "latency_ns": waterfall.latency_ns,
        "ttft_ns": None if token < 0 else token - arrival,
        "prompt_tokens": int(columns["prompt_tokens"][row]),
        "cached_tokens": int(columns["cached_tokens_first"][row]),
        "loaded_tokens": {
            name.removeprefix("loaded_"): int(column[row])
            for name, column in columns.items()
            if name.startswith("loaded_")
        },
        "output_tokens": int(columns["output_tokens"][row]),
        "preemptions": int(columns["preemptions"][row]),
        "router": _describe_choice(run, row),
        "parts": waterfall.parts,
        "ttft_parts": waterfall.ttft_parts,
    }
    if spans:
        about["spans"] = [_describe_span(run, row, arrival, span) for span in merge_spans(waterfall.spans)]
    return about


def _describe_choice(run: SavedRun, row: int) -> dict[str, Any] | None:
    """Return the router's last choice for a request; None if choices were not recorded."""
    if not run.decisions or not len(found := np.flatnonzero(run.decisions["rows"] == row)):
        return None
    last = found[-1]
    about: dict[str, Any] = {
        name: None if column.dtype.kind == "f" and np.isnan(column[last]) else column[last].item()
        for name, column in run.decisions.items()
        if name not in ("rows", "time_ns")
    }
    if run.reasons is not None:
        about["reason"] = run.reasons[last]
    return about


def _describe_span(run: SavedRun, row: int, arrival_ns: int, span: Span) -> dict[str, Any]:
    about: dict[str, Any] = {
        "after_ns": span.begin_ns - arrival_ns,
        "duration_ns": span.end_ns - span.begin_ns,
        "kind": span.kind,
        "parts": span.parts,
        "worker": span.worker,
        "steps": 0 if span.first_step < 0 else span.last_step - span.first_step + 1,
        "tokens": span.tokens,
        "others": [],
    }
    if span.first_step < 0:
        return about
    steps = run.steps
    part = slice(span.first_step, span.last_step + 1)
    if span.kind.startswith("wait") or span.kind == "preempted":
        about["others"] = _list_holders(run, part, row)
        lengths = steps.step_end_ns[part] - steps.step_begin_ns[part]
        about["at_head_ns"] = int(lengths[steps.step_head[part] == row].sum())
    elif span.tokens:
        about["others"] = _list_prompts(run, part, row)
    if span.kind == "preempted":
        preempted = (steps.event_kind == EventKind.PREEMPTED) & (steps.event_request == row)
        found = np.flatnonzero(preempted & (steps.event_ns <= span.begin_ns))
        by = int(steps.event_other[found[-1]]) if len(found) else row
        about["preempted_by"] = None if by == row else run.name(by)
    return about


def _list_holders(run: SavedRun, part: slice, row: int) -> list[dict[str, Any]]:
    """List the requests that held most KV blocks during these steps, with their mean number of blocks."""
    steps = run.steps
    batches = steps.step_batch[part]
    lengths = (steps.step_end_ns - steps.step_begin_ns)[part].astype(np.float64)
    total = float(lengths.sum())
    entries = _entries_of(run, batches)
    if total == 0 or not len(entries):
        return []
    of_batch = np.bincount(batches - batches[0], weights=lengths)
    weights = of_batch[steps.entry_batch[entries] - batches[0]]
    tokens = (steps.entry_before[entries] + steps.entry_tokens[entries]) * weights / total
    return _list_top(run, row, entries, tokens / run.block_size, "blocks")


def _list_prompts(run: SavedRun, part: slice, row: int) -> list[dict[str, Any]]:
    """List the requests with most prompt tokens in these steps."""
    entries = _entries_of(run, run.steps.step_batch[part])
    entries = entries[run.steps.entry_decodes[entries] == 0]
    return _list_top(run, row, entries, run.steps.entry_tokens[entries].astype(np.float64), "tokens")


def _entries_of(run: SavedRun, batches: Any) -> Any:
    first = np.searchsorted(run.steps.entry_batch, batches[0])
    last = np.searchsorted(run.steps.entry_batch, batches[-1], "right")
    return np.arange(first, last)


def _list_top(run: SavedRun, row: int, entries: Any, weights: Any, unit: str) -> list[dict[str, Any]]:
    requests, inverse = np.unique(run.steps.entry_request[entries], return_inverse=True)
    sums = np.bincount(inverse.reshape(-1), weights=weights, minlength=len(requests))
    sums[requests == row] = 0
    order = np.argsort(-sums, kind="stable")[:MOST_NAMED]
    return [
        {"request": run.name(int(requests[at])), unit: round(float(sums[at]), 1)}
        for at in order.tolist()
        if sums[at] > 0
    ]

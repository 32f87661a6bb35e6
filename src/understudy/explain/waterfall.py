"""Split the latency of a request into parts that add up to it exactly, in ns."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.run.step_columns import EventKind, Stop

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from understudy.explain.saved_run import SavedRun

PARTS = {
    "front_end": "between client and engine",
    "router_queue": "in the router's queue",
    "step_in_progress": "until the step in progress ended",
    "wait_slots": "waiting: as many requests run as may",
    "wait_budget": "waiting: the step's tokens were spent",
    "wait_blocks": "waiting for KV blocks",
    "wait_transfers": "waiting for blocks being copied or loaded",
    "wait_preempted": "waiting: a schedule that preempts admits none",
    "wait_other": "waiting for another reason",
    "load": "its own blocks being loaded from a tier",
    "handoff": "KV on its way from the prefill to the decode worker",
    "planned": "in the next batch, behind the one that runs",
    "prefill": "prefill, its own tokens",
    "prefill_others": "prefill, steps lengthened by others",
    "preempted": "preempted, waiting to resume",
    "recompute": "recomputing after a preemption, its own tokens",
    "recompute_others": "recomputing, steps lengthened by others",
    "decode": "decode, its own tokens",
    "decode_prompts": "decode, steps lengthened by others' prompts",
    "decode_decodes": "decode, steps lengthened by others' decodes",
    "transfers": "steps lengthened by transfers or other ranks",
    "not_scheduled": "running, but without tokens in the step",
    "idle": "no step ran",
}
"""Parts of a latency and their meaning, in the order in which a request meets them."""
_WAITS = {
    Stop.SLOTS: "wait_slots",
    Stop.BUDGET: "wait_budget",
    Stop.BLOCKS: "wait_blocks",
    Stop.TRANSFERS: "wait_transfers",
    Stop.PREEMPTED: "wait_preempted",
}
_NAMES = list(PARTS)
_COMPUTE = len(_NAMES)  # a step that computes tokens of the request


def _number(part: str) -> int:
    return _NAMES.index(part)


_WAIT_OF_STOP = np.array([_number(_WAITS.get(stop, "wait_other")) for stop in Stop])


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a request's life; its parts add up to its duration."""

    begin_ns: int
    end_ns: int
    kind: str
    """`prefill`, `recompute` or `decode` for steps with its tokens, else the one part."""
    parts: dict[str, int]
    worker: int = -1
    first_step: int = -1
    """Row of the first step; -1 for a span without steps."""
    last_step: int = -1
    tokens: int = 0
    """Tokens of the request that the span's steps computed."""


@dataclass(frozen=True, slots=True)
class Waterfall:
    """Life of one request: consecutive spans from its arrival to its last token."""

    row: int
    latency_ns: int
    spans: tuple[Span, ...]
    first_token_ns: int | None
    """Engine time of the first token; None if there was none."""

    @property
    def parts(self) -> dict[str, int]:
        """Nanoseconds of each part of the latency; parts of 0 are left out."""
        return _sum_parts(self.spans)

    @property
    def ttft_parts(self) -> dict[str, int]:
        """Nanoseconds of each part of the time to the first token."""
        if self.first_token_ns is None:
            return {}
        return _sum_parts(
            span for span in self.spans if span.end_ns <= self.first_token_ns or span.kind == "front_end"
        )


def _sum_parts(spans: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for span in spans:
        for part, value in span.parts.items():
            found[part] = found.get(part, 0) + value
    return {part: found[part] for part in PARTS if found.get(part)}


class Waterfalls:
    """The waterfalls of a run's requests, computed one at a time."""

    def __init__(self, run: SavedRun) -> None:
        self.run = run
        steps = run.steps
        self._entries = _Groups(steps.entry_request, len(run))
        self._events = _Groups(steps.event_request, len(run))
        self._loads = _Groups(steps.loading_request, len(run))
        self._served_ns = run.served_ns

    def of(self, row: int) -> Waterfall | None:
        """Compute the waterfall of a request; None for a request that did not arrive or did not end."""
        run = self.run
        arrival = int(run.requests["arrival_ns"][row])
        served = int(self._served_ns[row])
        if arrival < 0 or served < 0:
            return None
        latency = served - arrival
        outside = run.front_end_ns
        end = served - outside
        spans: list[Span] = []
        events = self._events.of(row)
        placed = events[run.steps.event_kind[events] == EventKind.PLACED]
        times = run.steps.event_ns[placed].tolist()
        workers = run.steps.event_worker[placed].tolist()
        first = min([*times, end])
        if first > arrival:
            spans.append(Span(arrival, first, "router_queue", {"router_queue": first - arrival}))
        for at, (begin, worker) in enumerate(zip(times, workers, strict=True)):
            until = min(times[at + 1] if at + 1 < len(times) else end, end)
            if until > begin:
                # Each leg of a request with two workers has events of its own.
                ours = events[
                    (run.steps.event_worker[events] == worker) & (run.steps.event_ns[events] >= begin)
                ]
                spans += self._on_worker(
                    row, worker, begin, until, ours, is_sent=at + 1 < len(times), is_received=at > 0
                )
        if outside:
            spans.append(Span(end, served, "front_end", {"front_end": outside}))
        token = int(run.requests["first_token_ns"][row])
        return Waterfall(row, latency, tuple(spans), None if token < 0 else token - run.front_end_ns)

    def slowest(self, count: int) -> list[int]:
        """Return the rows of the requests with the highest latency, slowest first."""
        latency = self.run.latency_ns
        order = np.argsort(-latency, kind="stable")[:count]
        return [int(row) for row in order if latency[row] >= 0]

    def _on_worker(
        self,
        row: int,
        worker: int,
        begin_ns: int,
        end_ns: int,
        events: NDArray[np.int64],
        *,
        is_sent: bool,
        is_received: bool,
    ) -> list[Span]:
        """Split the time from `begin_ns` to `end_ns`, in which the request is on one worker.

        `is_sent`: its KV goes to another worker then; `is_received`: its KV comes from another worker.
        """
        steps = self.run.steps
        first, last = np.searchsorted(
            steps.step_worker, (worker, worker + 1)
        ).tolist()  # none: it ran no step
        low = first + int(np.searchsorted(steps.step_end_ns[first:last], begin_ns, "right"))
        high = first + int(np.searchsorted(steps.step_begin_ns[first:last], end_ns, "left"))
        part = slice(low, max(low, high))
        begins, ends = steps.step_begin_ns[part], steps.step_end_ns[part]
        batches = steps.step_batch[part]
        entries = self._entries.of(row)
        codes = self._codes(row, part, begin_ns, events, entries)
        if is_received:
            codes[codes == _number("load")] = _number("handoff")
        computed = np.flatnonzero(codes == _COMPUTE)
        if is_sent and len(computed):
            codes[computed[-1] + 1 :] = _number("handoff")
        spans: list[Span] = []
        cursor = begin_ns
        changes = np.flatnonzero(
            (np.diff(codes) != 0)
            | ((codes[1:] == _COMPUTE) & (np.diff(batches) != 0))
            | (begins[1:] > ends[:-1])
        )
        bounds = [0, *(changes + 1).tolist(), len(codes)] if len(codes) else []
        gap = "handoff" if is_sent or is_received else self._name_gap(row)
        for start, stop in pairwise(bounds):
            begin, end = max(int(begins[start]), begin_ns), min(int(ends[stop - 1]), end_ns)
            if begin > cursor:
                spans.append(Span(cursor, begin, gap, {gap: begin - cursor}, worker))
                cursor = begin
            if end <= begin:
                continue
            rows = slice(low + start, low + stop)
            if codes[start] == _COMPUTE:
                spans.append(self._compute_span(worker, rows, begin, end, entries, events))
            else:
                name = _NAMES[codes[start]]
                spans.append(Span(begin, end, name, {name: end - begin}, worker, rows.start, rows.stop - 1))
            cursor = end
        if cursor < end_ns:
            spans.append(Span(cursor, end_ns, gap, {gap: end_ns - cursor}, worker))
        return spans

    def _name_gap(self, row: int) -> str:
        """Name the part of time between steps, when the engine waits for transfers."""
        loaded = [column[row] for name, column in self.run.requests.items() if name.startswith("loaded_")]
        if not loaded:
            return "idle"
        return "load" if any(loaded) else "wait_transfers"

    def _codes(
        self, row: int, part: slice, begin_ns: int, events: NDArray[np.int64], entries: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the part that each step belongs to, or _COMPUTE."""
        steps = self.run.steps
        begins = steps.step_begin_ns[part]
        kinds = steps.event_kind[events]
        times = steps.event_ns[events]
        admitted_ns = times[(kinds == EventKind.ADMITTED) | (kinds == EventKind.RESUMED)]
        admitted = np.searchsorted(admitted_ns, begins, "right")
        preempted = np.searchsorted(times[kinds == EventKind.PREEMPTED], begins, "right")
        codes = _WAIT_OF_STOP[steps.step_stop[part]]
        codes[begins < begin_ns] = _number("step_in_progress")
        codes[preempted > 0] = _number("preempted")
        computes = np.isin(steps.step_batch[part], steps.entry_batch[entries])
        is_running = admitted > preempted
        if is_running.any():
            # Without a step since its last admission that computed its tokens, its first batch is still to come.
            computed = np.cumsum(computes)
            at_admission = np.searchsorted(begins, admitted_ns[np.maximum(admitted, 1) - 1], "left")
            before = np.append(0, computed)[at_admission]
            codes[is_running] = np.where(computed == before, _number("planned"), _number("not_scheduled"))[
                is_running
            ]
        loads = steps.loading_step[self._loads.of(row)]
        codes[loads[(loads >= part.start) & (loads < part.stop)] - part.start] = _number("load")
        codes[computes] = _COMPUTE
        return codes

    def _compute_span(
        self,
        worker: int,
        rows: slice,
        begin: int,
        end: int,
        entries: NDArray[np.int64],
        events: NDArray[np.int64],
    ) -> Span:
        """Split the steps of one batch by what made them last as long."""
        steps = self.run.steps
        found = steps.entry_batch[entries] == steps.step_batch[rows.start]
        entry = int(entries[np.argmax(found)])
        compute = min(int(steps.step_compute_ns[rows].sum()), end - begin)
        own = min(int(steps.entry_own_ns[entry]), compute)
        if steps.entry_decodes[entry]:
            kind = "decode"
            together = int(steps.step_decodes_ns[rows].sum()) or compute
            together = min(max(own, together), compute)
            parts = {
                "decode": own,
                "decode_decodes": together - own,
                "decode_prompts": compute - together,
            }
        else:
            kinds = steps.event_kind[events]
            again = steps.event_ns[events][kinds == EventKind.PREEMPTED]
            kind = "recompute" if len(again) and again[0] <= begin else "prefill"
            parts = {kind: own, f"{kind}_others": compute - own}
        parts["transfers"] = end - begin - compute
        tokens = int(steps.entry_tokens[entry]) * (rows.stop - rows.start)
        parts = {part: value for part, value in parts.items() if value}
        return Span(begin, end, kind, parts, worker, rows.start, rows.stop - 1, tokens)


class _Groups:
    """Rows of a column grouped by their value, each group in order."""

    def __init__(self, values: NDArray[np.int64], count: int) -> None:
        self._order = np.argsort(values, kind="stable")
        self._first = np.searchsorted(values[self._order], np.arange(count + 1))

    def of(self, value: int) -> NDArray[np.int64]:
        """Return the rows with this value."""
        return self._order[self._first[value] : self._first[value + 1]]

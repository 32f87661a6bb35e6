"""When the requests of a workload are sent, as its source recorded it or estimated, and their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from understudy.workload.columns import Int64Column
    from understudy.workload.workload import Workload

ANSWER_MS_PER_TOKEN = 20
"""Estimated time of an answer, per output token, where the source has no time for the turn that follows."""
_LATEST_NS = 2**62
"""Limit of an estimated time, so that sums of times fit 64 bits."""


def send_times_ns(workload: Workload) -> Int64Column:
    """Return when each request is sent: at the time that its source recorded, else estimated.

    A first turn is sent at its arrival. A later turn is sent at its recorded time (`elapsed_ns`); without one, its
    delay after the turn before was answered, with `ANSWER_MS_PER_TOKEN` for each output token of that turn. Without
    arrivals, all sessions begin at 0. With a graph, each request is sent at its earliest time (`not_before_ns`).
    """
    if workload.graph is not None:
        return np.minimum(workload.arrival_ns, _LATEST_NS) + np.minimum(
            workload.graph.not_before_ns, _LATEST_NS
        )
    times = workload.arrival_ns.copy()
    if not workload.turn.any():
        return times
    recorded = np.full(len(times), -1, np.int64) if workload.elapsed_ns is None else workload.elapsed_ns
    answers = workload.cut_output_tokens.astype(np.int64) * (ANSWER_MS_PER_TOKEN * 10**6)
    waits = np.minimum(workload.delay_ns, _LATEST_NS)
    known = np.minimum(times, _LATEST_NS) + np.minimum(np.maximum(recorded, 0), _LATEST_NS)
    following = workload.next_turn
    before = np.flatnonzero(workload.turn == 0)
    while len(before := before[following[before] >= 0]):
        later = following[before]
        answered = np.minimum(times[before], _LATEST_NS - answers[before]) + answers[before]
        estimated = np.minimum(answered, _LATEST_NS) + waits[later]
        sent = np.where(recorded[later] >= 0, known[later], estimated)
        times[later] = np.maximum(sent, times[before])  # turns stay in order
        before = later
    return times


def time_order(workload: Workload) -> Int64Column:
    """Return the rows in the order in which they are sent; rows of one time in row order."""
    times = send_times_ns(workload)
    if bool((times[1:] >= times[:-1]).all()):
        return np.arange(len(workload), dtype=np.int64)
    return np.argsort(times, kind="stable").astype(np.int64)


def describe_time_order(workload: Workload) -> tuple[str, ...]:
    """Say which times of the order are not recorded; empty if all are."""
    later = workload.turn > 0
    if workload.graph is not None or not later.any():
        return ()
    unknown = later if workload.elapsed_ns is None else later & (workload.elapsed_ns < 0)
    notes = []
    if not workload.has_arrivals:
        notes.append(
            "the trace has no timestamps: all sessions are taken to begin together; replay a fleet (--num-gpu-blocks) "
            "closed loop for an order with fewer at a time"
        )
    if unknown.any():
        notes.append(
            f"{int(unknown.sum()):,} of {int(later.sum()):,} later turns have no recorded time: each is taken to "
            f"follow its delay after the turn before was answered, at {ANSWER_MS_PER_TOKEN} ms per output token; give "
            "--model and --gpu to use the order of a replay"
        )
    return tuple(notes)

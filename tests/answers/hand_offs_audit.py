"""Audit hand-offs: each is counted once, its parts add up, and its bytes are those of its blocks."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

from answers.definitions import distribution, ratio
from answers.evidence import ns
from answers.links_audit import use_of_link
from answers.report_audit import duration_s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from answers.definitions import Difference
    from answers.evidence import Evidence


_ORDER = (
    "prefill_admit",
    "prefill_done",
    "decode_arrival",
    "posted",
    "landed",
    "decode_admit",
    "first_token",
)


def every_hand_off_is_counted_once(evidence: Evidence) -> Iterator[Difference]:
    """Ways, bytes and parts of the TTFT of prefill and decode workers."""
    said = evidence.report.get("handoff")
    if said is None:
        return
    flags, lines = evidence.case.flags, evidence.lines
    # A client may abort a request whose blocks are under way.
    ways = Counter(line["way"] for line in lines if line["way"] != 2 or line["landed_ms"] is not None)
    for name, way in (("local", 1), ("remote", 2), ("fallback", 3), ("failed", 4)):
        yield f"handoff.{name}", said[name], ways[way]
    block = int(flags["block-size"])
    size = int(flags.get("kv-bytes-per-token", 0)) * block
    moved = sum(line["bytes"] for line in lines)
    yield "handoff.bytes", said["bytes"], moved
    prefill, decode = int(flags["prefill-workers"]), int(flags["decode-workers"])
    for line in lines:
        name = f"{line['request']}: "
        blocks = -(-line["prompt_tokens"] // block)
        yield name + "whole blocks", (line["bytes"] % size if size else line["bytes"]), 0
        yield name + "blocks of the prompt", line["bytes"] <= blocks * size, True
        if line["way"] == 2 and line["landed_ms"] is not None:
            yield name + "prefill worker", 0 <= line["prefill_worker"] < prefill, True
            yield name + "decode worker", prefill <= line["worker"] < prefill + decode, True
            times = [line[f"{name_}_ms"] for name_ in _ORDER]
            known = [time for time in times if time is not None]
            yield name + "order", known, sorted(known)
    handed = [line for line in _landed(evidence) if line["first_token_ms"] is not None]
    yield (
        "handoff.ttft_ms",
        said["ttft_ms"],
        _mean([line["first_token_ms"] - line["arrival_ms"] for line in handed]),
    )
    parts = said["ttft_parts_ms"]
    values: list[Any] = list(parts.values()) if isinstance(parts, dict) else list(parts or [])
    if handed and None not in values:
        yield "parts of the TTFT", math.fsum(values), said["ttft_ms"]
    spans = [
        ((ns(line["landed_ms"]) or 0) - (ns(line["posted_ms"]) or 0)) / 1e6 for line in _landed(evidence)
    ]
    for key, value in distribution(spans).items():
        yield f"handoff.transfer_ms.{key}", said["transfer_ms"][key], value
    yield "pools", [pool["workers"] for pool in said["pools"]], [prefill, decode]


def _landed(evidence: Evidence) -> list[dict[str, Any]]:
    return [line for line in evidence.lines if line["way"] == 2 and line["landed_ms"] is not None]


def pools_are_busy_as_their_steps(evidence: Evidence) -> Iterator[Difference]:
    """A worker is busy while a request runs on it: in steps, until the last of their requests has ended there.

    A preempted request waits, and does not run; a step that is left of an ended request has none either.
    """
    said = evidence.report.get("handoff")
    if said is None:
        return
    seconds = duration_s(evidence.lines)
    start = min(ns(line["arrival_ms"]) or 0 for line in evidence.lines if line["arrival_ms"] is not None)
    busy, running = _work(evidence, start + round(seconds * 1e9))
    first = 0
    for pool in said["pools"]:
        workers = range(first, first + pool["workers"])
        first += pool["workers"]
        for name, of_worker in (("busy", busy), ("running", running)):
            mean = ratio(sum(of_worker[worker] for worker in workers) / len(workers) / 1e9, seconds)
            yield f"{pool['role']}: {name}", pool[f"{name}_mean"], mean
        yield f"{pool['role']}: idle", (pool["running_mean"] or 0) >= (pool["busy_mean"] or 0) - 1e-12, True
        yield (
            f"{pool['role']}: busiest",
            pool["busy_max"],
            ratio(max(busy[worker] for worker in workers) / 1e9, seconds),
        )
        yield f"{pool['role']}: held", (pool["held_mean"] or 0) <= (pool["held_max"] or 0) <= 1, True
    for link in said["links"]:
        yield f"{link['name']}: bytes", link["bytes"] >= said["bytes"], True
        yield from use_of_link(link["name"], link, seconds)


def _work(evidence: Evidence, end_ns: int) -> tuple[dict[int, int], dict[int, int]]:
    """Sum by worker the ns with a running request, and the ns of every running request, until `end_ns`.

    A request runs from its admission until it ends on the worker or is preempted; then from the next admission on.
    """
    saved = evidence.saved
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    ends = _ends_on_workers(evidence, end_ns)
    since: dict[tuple[int, int], int] = {}
    columns = (saved[f"event_{name}"] for name in ("request", "worker", "ns", "kind"))
    for request, worker, at, kind in sorted(zip(*columns, strict=True), key=lambda event: event[2]):
        if kind in _BEGINS:
            since[request, worker] = at
        elif kind == _PREEMPTED:
            spans[worker].append((since.pop((request, worker)), at))
    for (request, worker), at in since.items():
        spans[worker].append((at, ends[request, worker]))
    busy: dict[int, int] = defaultdict(int)
    running: dict[int, int] = defaultdict(int)
    for worker, of_worker in spans.items():
        reached = 0
        for begins, until in sorted((begins, min(until, end_ns)) for begins, until in of_worker):
            running[worker] += max(until - begins, 0)
            busy[worker] += max(until - max(begins, reached), 0)
            reached = max(reached, until)
    return busy, running


_BEGINS, _PREEMPTED = (1, 2), 3
"""Kinds of events in a saved run (docs/explain.md): admitted, resumed; preempted."""


def _ends_on_workers(evidence: Evidence, end_ns: int) -> dict[tuple[int, int], int]:
    """When each request left each of its workers: a prefill worker with its prompt, the last one at its end."""
    ends: dict[tuple[int, int], int] = {}
    for line in evidence.lines:
        ended = ns(line["finish_ms"])
        last = end_ns if ended is None else ended
        ends[line["request"], line["worker"]] = last
        if line["prefill_worker"] not in (None, line["worker"]):
            done = ns(line["prefill_done_ms"])
            ends[line["request"], line["prefill_worker"]] = last if done is None else done
    return ends


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None

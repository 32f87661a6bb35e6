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
    """The busy share of each pool is that of its workers' steps; links carried what was handed off."""
    said = evidence.report.get("handoff")
    if said is None:
        return
    saved, seconds = evidence.saved, duration_s(evidence.lines)
    busy: dict[int, int] = defaultdict(int)
    start = min(ns(line["arrival_ms"]) or 0 for line in evidence.lines if line["arrival_ms"] is not None)
    end = start + round(seconds * 1e9)
    scheduled = set(saved["entry_batch"])
    columns = (saved[f"step_{name}"] for name in ("worker", "begin_ns", "end_ns", "batch"))
    for worker, begins, ends, batch in zip(*columns, strict=True):
        if batch in scheduled:
            busy[worker] += max(min(ends, end) - begins, 0)
    # A request that ends before its output was expected to may leave a step without it behind; a preempted one counts.
    whole = all(line["finish_reason"] == "length" and not line["preemptions"] for line in evidence.lines)
    first = 0
    for pool in said["pools"]:
        shares = [busy[worker] for worker in range(first, first + pool["workers"])]
        first += pool["workers"]
        if whole:
            yield (
                f"{pool['role']}: busy",
                pool["busy_mean"],
                ratio(sum(shares) / pool["workers"] / 1e9, seconds),
            )
            yield f"{pool['role']}: busiest", pool["busy_max"], ratio(max(shares) / 1e9, seconds)
        yield f"{pool['role']}: held", (pool["held_mean"] or 0) <= (pool["held_max"] or 0) <= 1, True
    for link in said["links"]:
        yield f"{link['name']}: bytes", link["bytes"] >= said["bytes"], True
        yield from use_of_link(link["name"], link, seconds)


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None

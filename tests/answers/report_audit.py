"""Audit the figures of a report: recompute them from the lines of its requests, by docs/metrics.md."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from answers.definitions import distribution, ratio
from answers.evidence import NS, ns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from answers.definitions import Difference
    from answers.evidence import Evidence


def distributions(evidence: Evidence) -> Iterator[Difference]:
    """Every distribution of the requests, from their times in nanoseconds."""
    for name, values in expected_values(evidence.lines).items():
        for key, value in distribution(values).items():
            yield f"{name}.{key}", evidence.report[name][key], value


def expected_values(lines: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The values of each distribution, over completed requests."""
    done = [line for line in lines if line["status"] == "completed"]
    one = [line for line in done if line["output_tokens"] >= 1]
    two = [line for line in done if line["output_tokens"] >= 2]
    decode = [_between(line, "first_token_ms", "last_token_ms") / (line["output_tokens"] - 1) for line in two]
    last = [
        _between(line, "arrival_ms", "last_token_ms" if line["output_tokens"] else "finish_ms")
        for line in done
    ]
    return {
        "ttft_ms": [_between(line, "arrival_ms", "first_token_ms") for line in one],
        "ttft_queued_ms": [_between(line, "queued_ms", "first_token_ms") for line in one],
        "ttst_ms": [_between(line, "first_token_ms", "second_token_ms") for line in two],
        "tpot_ms": decode,
        "e2e_ms": last,
        "queue_ms": [_between(line, "arrival_ms", "first_admit_ms") for line in done],
        "output_tokens_per_s_per_user": [1000 / gap for gap in decode if gap > 0],
        "prompt_tokens": [float(line["prompt_tokens"]) for line in done],
        "output_tokens": [float(line["output_tokens"]) for line in done],
    }


def _between(line: dict[str, Any], begin: str, end: str) -> float:
    before, after = ns(line[begin]), ns(line[end])
    assert before is not None
    assert after is not None
    return (after - before) / NS


def counts_and_rates(evidence: Evidence) -> Iterator[Difference]:
    """Requests by status, tokens, duration, throughput and hits."""
    report, lines = evidence.report, evidence.lines
    by = {name: sum(line["status"] == name for line in lines) for name in _STATUSES}
    done = [line for line in lines if line["status"] == "completed"]
    yield "requests.total", report["requests"]["total"], len(evidence.case.rows)
    for name, count in by.items():
        yield f"requests.{name}", report["requests"][name], count
    for name, reason in (("stopped", "stop"), ("length_capped", "length")):
        yield (
            f"requests.{name}",
            report["requests"][name],
            sum(line["finish_reason"] == reason for line in lines),
        )
    inputs = sum(line["prompt_tokens"] for line in done)
    outputs = sum(line["output_tokens"] for line in done)
    seconds = duration_s(lines)
    yield "duration_s", report["duration_s"], seconds
    yield "tokens.input", report["tokens"]["input"], inputs
    yield "tokens.output", report["tokens"]["output"], outputs
    amounts = {
        "requests_per_s": len(done),
        "input_tokens_per_s": inputs,
        "output_tokens_per_s": outputs,
        "total_tokens_per_s": inputs + outputs,
    }
    for name, amount in amounts.items():
        yield f"throughput.{name}", report["throughput"][name], ratio(amount, seconds)
    admitted = [line for line in lines if line["first_admit_ms"] is not None]
    prompts = sum(line["prompt_tokens"] for line in admitted)
    first = sum(line["cached_tokens_first"] for line in admitted)
    looked_up = sum(line["looked_up_tokens"] for line in lines)
    total = sum(line["cached_tokens_total"] for line in lines)
    yield (
        "prefix_hit_ratio.first_admission",
        report["prefix_hit_ratio"]["first_admission"],
        ratio(first, prompts),
    )
    yield "prefix_hit_ratio.total", report["prefix_hit_ratio"]["total"], ratio(total, looked_up)
    yield "preemptions", report["preemptions"], sum(line["preemptions"] for line in lines)


_STATUSES = ("completed", "rejected", "cancelled", "unfinished", "failed")


def duration_s(lines: list[dict[str, Any]]) -> float:
    """First arrival to the last token of any request, or to the last completion."""
    arrivals = [ns(line["arrival_ms"]) or 0 for line in lines if line["arrival_ms"] is not None]
    ends = [ns(line["last_token_ms"]) or 0 for line in lines if line["last_token_ms"] is not None]
    ends = ends or [ns(line["finish_ms"]) or 0 for line in lines if line["status"] == "completed"]
    start = min(arrivals, default=0)
    return max(max(ends, default=start) - start, 0) / 1e9


def sums_of_groups(evidence: Evidence) -> Iterator[Difference]:
    """The groups of requests that `compare` draws from add up to the report."""
    report = evidence.report
    groups = report.get("groups")
    if groups is None:
        return
    good = report["goodput"]
    whole = {
        "requests": report["requests"]["total"],
        "completed": report["requests"]["completed"],
        "good": None if good is None else good["requests"],
        "with_token": report["ttft_ms"]["count"],
        "ttft_ms": report["ttft_ms"]["count"] * (report["ttft_ms"]["mean"] or 0),
        "e2e_ms": report["e2e_ms"]["count"] * (report["e2e_ms"]["mean"] or 0),
        "gaps": report["itl_ms"]["count"],
        "gaps_ms": report["itl_ms"]["count"] * (report["itl_ms"]["mean"] or 0),
    }
    for name, value in whole.items():
        yield f"groups.{name}", None if groups[name] is None else math.fsum(groups[name]), value


def no_run_beats_the_unlimited_cache(evidence: Evidence) -> Iterator[Difference]:
    """No run hits more than one unlimited cache; nor, but for tiers that workers share, than one per worker."""
    facts, flags = evidence.report["run"], evidence.case.flags
    hits = evidence.report["prefix_hit_ratio"]["first_admission"]
    names = (
        ["unlimited_hit_ratio"] if {"g3", "g4"} & set(flags) else ["unlimited_hit_ratio", "routed_hit_ratio"]
    )
    for name in names:
        bound = facts.get(name)
        if bound is not None and hits is not None:
            yield f"hits of {hits} within run.{name} = {bound}", hits <= bound + 1e-9, True


def attainment(evidence: Evidence) -> Iterator[Difference]:
    """Goodput by the goals of the command."""
    flags, lines = evidence.case.flags, evidence.lines
    goals = {
        name: float(flags[f"slo-{name}-ms"]) for name in ("ttft", "itl", "e2e") if f"slo-{name}-ms" in flags
    }
    said = evidence.report["goodput"]
    if not goals:
        yield "goodput", said, None
        return
    yield (
        "goodput.slo",
        {name: value for name, value in said["slo"].items() if value is not None},
        {f"{name}_ms": goal for name, goal in goals.items()},
    )
    good = [line for line in lines if line["status"] == "completed" and _meets(line, goals)]
    seconds = duration_s(lines)
    yield "goodput.requests", said["requests"], len(good)
    yield "goodput.ratio", said["ratio"], ratio(len(good), len(lines))
    yield "goodput.requests_per_s", said["requests_per_s"], ratio(len(good), seconds)
    tokens = sum(line["output_tokens"] for line in good)
    yield "goodput.output_tokens_per_s", said["output_tokens_per_s"], ratio(tokens, seconds)


def _meets(line: dict[str, Any], goals: dict[str, float]) -> bool:
    tokens = line["output_tokens"]
    if tokens == 0 and set(goals) != {"e2e"}:
        return False
    spent = {"e2e": _between(line, "arrival_ms", "last_token_ms" if tokens else "finish_ms")}
    if tokens:
        spent["ttft"] = _between(line, "arrival_ms", "first_token_ms")
        spent["itl"] = _between(line, "first_token_ms", "last_token_ms") / max(tokens - 1, 1)
    return all(spent[name] <= goal + 1e-9 for name, goal in goals.items())


def latencies_of_lines(evidence: Evidence) -> Iterator[Difference]:
    """The latencies that a line has are differences of the times that it has."""
    for line in evidence.lines:
        if line["status"] != "completed":
            continue
        values = expected_values([line])
        for name in ("queue_ms", "ttft_ms", "ttft_queued_ms", "ttst_ms", "tpot_ms", "e2e_ms"):
            yield f"{line['request']}: {name}", line[name], values[name][0] if values[name] else None

"""Metamorphic rules: how an answer must change, or must not, when the question changes in a known way."""

from __future__ import annotations

import json
from dataclasses import replace as change
from random import Random
from typing import TYPE_CHECKING, Any

from answers.evidence import replay, run, write_trace
from answers.predict_audit import predictions_change_as_their_questions_do
from answers.random_cases import Case, random_case
from answers.random_traces import BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from answers.definitions import Difference

_PLACES = ("worker", "session", "turn", "status", "finish_reason")
_COUNTS = ("output_tokens", "cached_tokens_first", "cached_tokens_total", "preemptions")
_SPANS = ("queue_ms", "ttft_ms", "ttst_ms", "tpot_ms", "e2e_ms")
_SWITCHES = ("no-enable-prefix-caching", "enable-lora", "max-model-len", "scheduling-policy", "max-loras")


def _lives(case: Case, folder: Path) -> list[tuple[Any, ...]]:
    """What happened to each request, without the time of day."""
    lines = replay(case, folder).lines
    return [tuple(line[name] for name in (*_PLACES, *_COUNTS, *_SPANS)) for line in lines]


def later_start(case: Case, folder: Path) -> Iterator[Difference]:
    """A trace that starts an hour later has the same latencies."""
    rows = [dict(row) for row in case.rows]
    for row in rows:
        if "timestamp" in row:
            row["timestamp"] = round(row["timestamp"] + 3_600_000, 3)
    yield "lives", _lives(change(case, rows=tuple(rows)), folder), _lives(case, folder)


def other_names(case: Case, folder: Path) -> Iterator[Difference]:
    """Other hash ids, sessions and adapters, of which as many are equal, change nothing."""
    rows = [dict(row) for row in case.rows]
    for row in rows:
        row["hash_ids"] = [7 * number + 5 for number in row["hash_ids"]]
        for name in ("session_id", "lora"):
            if name in row:
                row[name] = f"other-{row[name]}"
    yield "lives", _lives(change(case, rows=tuple(rows)), folder), _lives(case, folder)


def rate_is_time(case: Case, folder: Path) -> Iterator[Difference]:
    """--arrival-rate-scale 2 equals a trace whose times and delays are halved."""
    if "concurrency" in case.flags:
        return
    rows = [dict(row) for row in case.rows]
    for row in rows:
        for name in ("timestamp", "delay"):
            if name in row:  # even nanoseconds, so that half of them is exact
                row[name] = round(row[name] * 1000) * 2 / 1000
    halved = [dict(row) for row in rows]
    for row in halved:
        for name in ("timestamp", "delay"):
            if name in row:
                row[name] = row[name] / 2
    scaled = change(case, rows=tuple(rows)).with_flags(arrival_rate_scale="2")
    plain = change(case, rows=tuple(halved)).with_flags(arrival_rate_scale=None)
    yield "lives", _lives(scaled, folder), _lives(plain, folder)


def the_future_changes_nothing(case: Case, folder: Path) -> Iterator[Difference]:
    """Requests that arrive after all others ended do not change them."""
    if "concurrency" in case.flags or case.flags.get("routing") in ("random", "power_of_two"):
        return
    lines = replay(case, folder).lines
    before = [tuple(line[name] for name in (*_PLACES, *_COUNTS, *_SPANS)) for line in lines]
    last = max(row["timestamp"] for row in case.rows if "timestamp" in row) + 10_000_000
    new = {"input_length": 40, "output_length": 3}
    more = [{"timestamp": last + at, "hash_ids": [9000 + at] * 3, **new} for at in range(3)]
    after = _lives(change(case, rows=(*case.rows, *more)), folder)
    yield "lives of the first part", after[: len(before)], before


def order_of_lines(case: Case, folder: Path) -> Iterator[Difference]:
    """The order of a file's lines does not matter where first turns arrive at distinct times."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for number, row in enumerate(case.rows):
        sessions.setdefault(str(row.get("session_id", number)), []).append(row)
    starts = [turns[0]["timestamp"] for turns in sessions.values()]
    if len(set(starts)) < len(starts) or "concurrency" in case.flags:
        return
    shuffled = list(sessions.items())
    Random(case.seed).shuffle(shuffled)
    order = [id(row) for _, turns in shuffled for row in turns]
    rows = tuple(row for _, turns in shuffled for row in turns)
    lives = dict(zip(order, _lives(change(case, rows=rows), folder), strict=True))
    expected = _lives(case, folder)
    without_number = [life[:1] + life[2:] for life in expected]
    yield "lives", [lives[id(row)][:1] + lives[id(row)][2:] for row in case.rows], without_number


def shorter_outputs(case: Case, folder: Path) -> Iterator[Difference]:
    """--max-tokens N equals a trace whose requests have a limit of N."""
    rows = [dict(row) for row in case.rows]
    for row in rows:
        row.setdefault("max_tokens", 7)
    limited = change(case, rows=tuple(rows)).with_flags(max_tokens=None)
    yield "lives", _lives(case.with_flags(max_tokens="7"), folder), _lives(limited, folder)


def longer_goals(case: Case, folder: Path) -> Iterator[Difference]:
    """A longer objective never lowers attainment, and changes nothing else."""
    goal = {f"slo_{name}_ms": None for name in ("ttft", "itl", "e2e")}
    name = ("slo_ttft_ms", "slo_itl_ms", "slo_e2e_ms")[case.seed % 3]
    last = -1.0
    digests = set()
    for limit in ("3", "9", "30", "100", "1000", "100000"):
        report = replay(case.with_flags(**{**goal, name: limit}), folder).report
        digests.add(report["run"]["digest"])
        yield f"attainment at {limit} ms", report["goodput"]["ratio"] >= last, True
        last = report["goodput"]["ratio"]
    yield "digests", len(digests), 1


def twice_the_price(case: Case, folder: Path) -> Iterator[Difference]:
    """Twice the price doubles every cost, and changes neither the answer nor the order."""
    if case.kind == "hand_offs" or "routing" not in case.flags or "workers" not in case.flags:
        return
    trace = str(write_trace(list(case.rows), folder / "trace.jsonl"))
    goals = dict.fromkeys(("slo_itl_ms", "slo_e2e_ms", "workers"))
    flags = case.with_flags(**goals, slo_ttft_ms="200").arguments()
    vary = ("--vary", "workers=2,3", "--goal", "0.5", "--jobs", "1", "--json", "-")
    sweeps = [
        json.loads(run("sweep", trace, *flags, *vary, "--gpu-hour", price)) for price in ("1.25", "2.5")
    ]
    costs = [[trial["cost_per_hour"] for trial in sweep["trials"]] for sweep in sweeps]
    yield "costs", costs[1], [2 * cost for cost in costs[0]]
    answers = [(sweep["answers"][0]["best"] or {}).get("flags") for sweep in sweeps]
    yield "answer", answers[1], answers[0]
    orders = [[point["flags"] for point in sweep["answers"][0]["front"]] for sweep in sweeps]
    yield "front", orders[1], orders[0]


def alone(case: Case) -> Case:
    """One worker that serves one request at a time; nothing waits for anything but the request before it."""
    rows = [{name: row[name] for name in row if name not in ("abort_after_ms", "lora")} for row in case.rows]
    flags = dict.fromkeys(("routing", "seed", "event_delay_ms", "router_queue_threshold", *_SWITCHES))
    single = change(case, rows=tuple(rows)).with_flags(**flags)
    if case.kind not in ("hand_offs", "pools"):
        single = single.with_flags(workers="1")
    return single.with_flags(concurrency="1", arrival_rate_scale=None)


def more_blocks(case: Case, folder: Path) -> Iterator[Difference]:
    """One request at a time: more blocks never lower the hits, in all or of any request."""
    if case.flags.get("disaggregation", "always") != "always":
        # Such a rule looks into the decode worker's cache: with more blocks there a prompt may stay on it, so that no
        # prefill worker computes and keeps it, and a later prompt that is sent to one misses what it hit before.
        # Elsewhere no choice depends on a cache: without --routing, workers take turns, or there is but one.
        return
    case = alone(case)
    name = "max-total-tokens" if case.kind == "sglang" else "num-gpu-blocks"
    if name not in case.flags:
        return
    before: list[int] | None = None
    for factor in (1, 2, 3, 8):
        more = change(case, flags={**case.flags, name: str(int(case.flags[name]) * factor)})
        hits = [line["cached_tokens_first"] for line in replay(more, folder).lines]
        if before is not None:
            fewer = [at for at, (old, new) in enumerate(zip(before, hits, strict=True)) if new < old]
            yield f"{factor} times the blocks: requests with fewer hits", fewer, []
        before = hits


def faster_link(case: Case, folder: Path) -> Iterator[Difference]:
    """One request at a time, enough blocks: a faster link makes no request slower."""
    case = alone(case)
    name = "kv-link-gbps" if case.kind == "hand_offs" else "g2-bandwidth-gbps"
    if name not in case.flags or case.flags.get("transfer-failure-rate"):
        return
    for roomy in ("g2", "num-gpu-blocks", "max-total-tokens"):
        if roomy in case.flags:
            case = change(
                case, flags={**case.flags, roomy: "100000" if roomy != "max-total-tokens" else "1600000"}
            )
    before: list[float] | None = None
    for bandwidth in ("0.1", "1", "20", "400"):
        spans = [
            line["e2e_ms"]
            for line in replay(change(case, flags={**case.flags, name: bandwidth}), folder).lines
        ]
        if before is not None:
            slower = [
                at
                for at, (old, new) in enumerate(zip(before, spans, strict=True))
                if old and new > old + 1e-6
            ]
            yield f"{bandwidth} GB/s: slower requests", slower, []
        before = spans


def more_workers(case: Case, folder: Path) -> Iterator[Difference]:
    """Round robin, unrelated requests: twice the workers never raise the requests or tokens of the busiest one."""
    if case.kind in ("hand_offs", "models", "pools") or any("session_id" in row for row in case.rows):
        return
    rows = [dict(row) for row in case.rows]
    for number, row in enumerate(rows):
        row["hash_ids"] = [100 * number + at for at, _ in enumerate(row["hash_ids"])]
    dropped = dict.fromkeys(("seed", "concurrency", "event_delay_ms", "router_queue_threshold"))
    case = change(case, rows=tuple(rows)).with_flags(routing="round_robin", **dropped)
    before: list[int] | None = None
    for workers in (1, 2, 4):
        lines = replay(case.with_flags(workers=str(workers)), folder).lines
        tokens = [0] * workers
        for line in lines:
            if line["worker"] is not None:
                tokens[line["worker"]] += line["prompt_tokens"] + line["output_tokens"]
        if before is not None and not any("abort_after_ms" in row for row in rows):
            yield f"{workers} workers: busiest", max(tokens) <= max(before), True
            yield f"{workers} workers: tokens in all", sum(tokens), sum(before)
        before = tokens


def longer_blocks_of_a_trace(case: Case, folder: Path) -> Iterator[Difference]:
    """Hash ids of half the size, two for each, say the same."""
    rows = []
    for row in case.rows:
        ids = [half for number in row["hash_ids"] for half in (2 * number, 2 * number + 1)]
        rows.append({**row, "hash_ids": ids[: -(-row["input_length"] * 2 // BLOCK)]})
    finer = change(case, rows=tuple(rows)).with_flags(trace_block_size=str(BLOCK // 2))
    yield "lives", _lives(finer, folder), _lives(case, folder)


def checked(case: Case, folder: Path) -> Iterator[Difference]:
    """A run under --check, and one that steps, are the same run."""
    expected = replay(case, folder).report["run"]["digest"]
    for name in ("check", "no_fast_forward"):
        yield name, replay(case.with_flags(**{name: ""}), folder).report["run"]["digest"], expected


RULES: dict[str, Callable[[Case, Path], Iterator[Difference]]] = {
    rule.__name__: rule
    for rule in (
        later_start,
        other_names,
        rate_is_time,
        the_future_changes_nothing,
        order_of_lines,
        shorter_outputs,
        longer_goals,
        twice_the_price,
        more_blocks,
        faster_link,
        more_workers,
        longer_blocks_of_a_trace,
        checked,
        predictions_change_as_their_questions_do,
    )
}


def rule_of(seed: int) -> tuple[str, Case]:
    """The rule and the case of a seed: rules take turns, and every rule meets every kind."""
    return list(RULES)[seed % len(RULES)], random_case(seed // len(RULES))

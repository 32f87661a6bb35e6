"""Audit the line of every request: each ends once, at times that follow from its trace."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from answers.evidence import ns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from answers.definitions import Difference
    from answers.evidence import Evidence

ORDER = (
    "arrival_ms",
    "queued_ms",
    "first_admit_ms",
    "first_token_ms",
    "second_token_ms",
    "last_token_ms",
    "finish_ms",
)


def every_request_ends_once(evidence: Evidence) -> Iterator[Difference]:
    """One line per row; lengths are those of the trace, and a completed request has all of its tokens."""
    rows, lines, flags = evidence.case.rows, evidence.lines, evidence.case.flags
    yield "lines", [line["request"] for line in lines], list(range(len(rows)))
    context = int(flags.get("max-model-len", 1 << 40))
    for number, (row, line) in enumerate(zip(rows, lines, strict=True)):
        limit = row.get("max_tokens", int(flags.get("max-tokens", 1 << 40)))
        wanted = min(row["output_length"], limit)
        yield f"{number}: prompt", line["prompt_tokens"], row["input_length"]
        yield f"{number}: requested output", line["requested_output_tokens"], wanted
        most = min(wanted, context - row["input_length"])
        if line["status"] == "completed" and not evidence.case.has_sglang:
            yield f"{number}: output", line["output_tokens"], most
        yield f"{number}: output within its limit", line["output_tokens"] <= max(most, 0), True
        reason = line["finish_reason"]
        yield f"{number}: reason", reason in ("length", "stop"), line["status"] == "completed"
        times = [ns(line[name]) for name in ORDER]
        known = [time for time in times if time is not None]
        yield f"{number}: order of times", known, sorted(known)
        yield f"{number}: has a first token", line["first_token_ms"] is not None, line["output_tokens"] > 0
        yield f"{number}: cached prompt", 0 <= line["cached_tokens_first"] <= row["input_length"], True


def arrivals_follow_the_trace(evidence: Evidence) -> Iterator[Difference]:
    """Open loop: first turns arrive at their timestamps, later ones a delay after the turn before ended."""
    rows, lines, flags = evidence.case.rows, evidence.lines, evidence.case.flags
    scale = float(flags.get("arrival-rate-scale", 1))
    closed = "concurrency" in flags
    first = min(row["timestamp"] for row in rows if "timestamp" in row)
    for number, (row, line) in enumerate(zip(rows, lines, strict=True)):
        turn = _turn_before(evidence, number)
        if turn is None:
            if not closed:
                since = round(row["timestamp"] * 1e6) - round(first * 1e6)
                yield f"{number}: arrival", ns(line["arrival_ms"]), round(since / scale)
            continue
        before = lines[turn]
        if before["arrival_ms"] is None:
            yield f"{number}: not reached", line["arrival_ms"], None
        elif line["arrival_ms"] is not None:
            ended = ns(before["finish_ms"])
            delay = round(round(row.get("delay", 0) * 1e6) / scale)
            yield f"{number}: arrival of a later turn", ns(line["arrival_ms"]), (ended or 0) + delay


def a_closed_loop_keeps_its_limit(evidence: Evidence) -> Iterator[Difference]:
    """No more sessions are open at one time than --concurrency allows."""
    limit = evidence.case.flags.get("concurrency")
    if limit is None:
        return
    spans: dict[int, list[Any]] = {}
    for line in evidence.lines:
        if line["arrival_ms"] is not None:
            spans.setdefault(line["session"], []).extend([ns(line["arrival_ms"]), ns(line["finish_ms"])])
    ends = sorted([(max(span), -1) for span in spans.values()] + [(min(span), 1) for span in spans.values()])
    opened = most = 0
    for _, change in ends:
        opened += change
        most = max(most, opened)
    yield "sessions open at one time", most <= int(limit), True


def hits_have_a_cause(evidence: Evidence) -> Iterator[Difference]:
    """No prompt hits tokens that no request with the same beginning had submitted before it was admitted."""
    rows, lines = evidence.case.rows, evidence.lines
    for number, (row, line) in enumerate(zip(rows, lines, strict=True)):
        admitted = ns(line["first_admit_ms"])
        if admitted is None or line["cached_tokens_first"] == 0:
            continue
        best = 0
        for other, (earlier, its) in enumerate(zip(rows, lines, strict=True)):
            begun = ns(its["first_admit_ms"])
            if (
                other != number
                and begun is not None
                and begun <= admitted
                and row.get("lora") == earlier.get("lora")
            ):
                best = max(best, _shared(row, earlier, _turn_after(evidence, other)))
        yield f"{number}: cached tokens with a cause", line["cached_tokens_first"] <= best, True


def _shared(row: dict[str, Any], earlier: dict[str, Any], following: dict[str, Any] | None) -> int:
    """Tokens at the start of a prompt that an earlier request had, with its output where the next turn quotes it."""
    ids, known = earlier["hash_ids"], earlier["input_length"]
    if earlier.get("output_in_next_turn") and following is not None:
        ids, known = following["hash_ids"], earlier["input_length"] + earlier["output_length"]
    equal = 0
    for mine, its in zip(row["hash_ids"], ids, strict=False):
        if mine != its:
            break
        equal += 16
    return int(min(equal, known, row["input_length"]))


def _turn_before(evidence: Evidence, number: int) -> int | None:
    line = evidence.lines[number]
    earlier = [its["request"] for its in evidence.lines[:number] if its["session"] == line["session"]]
    return earlier[-1] if earlier and line["turn"] else None


def _turn_after(evidence: Evidence, number: int) -> dict[str, Any] | None:
    line = evidence.lines[number]
    later = [its["request"] for its in evidence.lines[number + 1 :] if its["session"] == line["session"]]
    return evidence.case.rows[later[0]] if later else None


def gaps_of(times: list[int]) -> list[int]:
    """Times between consecutive tokens."""
    return [after - before for before, after in pairwise(times)]

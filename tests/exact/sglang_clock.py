"""Record SGLang's event loops on a virtual clock."""

from __future__ import annotations

from typing import Any

from exact.sglang_play import Play
from exact.sglang_state import batch_line, batch_rows

Line = dict[str, Any]


def record_clock(scenario: Line) -> Line:
    """Return the times of tokens, ends and batches, in ns."""
    play, clock = Play(scenario), scenario["clock"]
    inputs = [(one["t"], 0, place) for place, one in enumerate(scenario["requests"])]
    inputs += [(one["t"], 1, place) for place, one in enumerate(scenario.get("aborts") or ())]
    inputs.sort()
    tokens: dict[str, list[int]] = {one["id"]: [] for one in scenario["requests"]}
    cached: dict[str, int | None] = dict.fromkeys(tokens)
    ends: dict[str, list[Any]] = {}
    trace: list[list[Any]] = []
    outstanding: list[int] = []
    now = free = turns = 0
    rests = True
    while inputs or len(ends) < len(tokens):
        if rests:
            if not inputs:
                break  # requests wait that can never run
            now = max(now, inputs[0][0])
        play.begin(turns)
        start = now
        while inputs and inputs[0][0] <= now:
            _, kind, place = inputs.pop(0)
            if kind:
                play.abort(scenario["aborts"][place]["id"])
            else:
                play.add(scenario["requests"][place])
        batch = play.schedule()
        for name in play.aborted:
            ends[name] = [now, "abort"]
        turns += 1
        if batch is not None:
            line, rows = batch_line(play, batch), batch_rows(batch)
            prefill = sum(tokens for _, tokens, decodes in rows if not decodes)
            now += clock["launch_ns"]
            begin = max(now, free)
            free = begin + clock["base_ns"]
            free += clock["prefill_token_ns"] * prefill + clock["decode_row_ns"] * sum(
                decodes for *_, decodes in rows
            )
            trace.append([start, now, begin, free, line["scheduled"]])
            outstanding.append(free)
            cached.update({name: line["cached"][name] for name in line["new"]})
        processed = bool(play.real.last_batch) if play.config["overlap"] else batch is not None
        if processed:
            now = max(now, outstanding.pop(0)) + clock["result_ns"]
        before = len(play.aborted)
        play.process(batch)
        for name in play.tokens:
            tokens[name].append(now)
        for name in play.finished:
            ends[name] = [now, play.end_reason(name)]
        for name in play.aborted[before:]:
            ends.setdefault(name, [now, "abort"])
        rests = batch is None and not outstanding
    requests = {
        one["id"]: {
            "arrival": one["t"],
            "cached": cached[one["id"]],
            "tokens": tokens[one["id"]],
            "end": ends.get(one["id"]),
        }
        for one in scenario["requests"]
    }
    return {
        "config": play.config,
        "requests": requests,
        "turns": turns,
        "batches": len(trace),
        "end": now,
        "trace": trace,
    }

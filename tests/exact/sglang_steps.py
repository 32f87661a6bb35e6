"""Record a scenario step by step, in the lines of the recordings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sglang

from exact.sglang_play import Play
from exact.sglang_state import batch_line, host_line, state_line
from exact.sglang_wire import EventNames, published_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

Line = dict[str, Any]
_MODES = {"extend": "prefill", "decode": "decode", "mixed": "mixed", None: "idle"}


def record_steps(scenario: Line) -> list[Line]:
    """Return the header, a line for each step, and the totals."""
    play = Play(scenario)
    header = {"sglang": sglang.__version__, "config": play.config, "requests": len(scenario["requests"])}
    return [{"header": header}, *_lines(play, scenario)]


def _lines(play: Play, scenario: Line) -> Iterator[Line]:
    specs, aborts = list(scenario["requests"]), list(scenario.get("aborts") or ())
    totals = dict.fromkeys([*(f"{mode}_steps" for mode in _MODES.values()), "retractions"], 0)
    sums = {"scheduled_tokens": 0, "cached_tokens": 0, "stored_blocks": 0, "removed_blocks": 0}
    names = EventNames(play.config["page_size"], medium=play.transfers is not None)
    ended: set[str] = set()
    step, reason = 0, "done"
    while len(ended) < len(scenario["requests"]):
        if step == scenario["max_steps"]:
            reason = "max_steps"
            break
        play.begin(step)
        for spec in [one for one in specs if one["arrival_step"] <= step]:
            play.add(spec)
            specs.remove(spec)
        for abort in [one for one in aborts if one["step"] <= step]:
            play.abort(abort["id"])
            aborts.remove(abort)
        try:
            batch = play.schedule()
        except RuntimeError as error:
            if "out of memory" not in str(error).lower():
                raise
            reason = "out of memory"
            break
        line: Line = {"step": step, **batch_line(play, batch)}
        play.process(batch)
        line |= state_line(play)
        events = [] if play.config["publish_events"] else names.named(play.take_events())
        line["kv_events"] = events
        if play.config["enable_priority_scheduling"]:
            line["preempted"] = list(play.preempted)
        if play.config["publish_events"]:
            line["published"] = [published_batch(kind, batch) for kind, batch in play.published]
        line |= host_line(play)
        ended.update(play.finished, play.aborted)
        totals[f"{_MODES[line['mode']]}_steps"] += 1
        totals["retractions"] += len(line["retracted"])
        sums["scheduled_tokens"] += sum(line["scheduled"].values())
        sums["cached_tokens"] += sum(line["cached"].values())
        for event in events:
            sums[f"{event['type']}_blocks"] += event["n"]
        step += 1
        yield line
    yield {"end": {"reason": reason, "steps": step, "finished": len(ended), **totals, **sums}}

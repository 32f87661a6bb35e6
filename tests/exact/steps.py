"""Record scenarios by steps, without and with speculation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import vllm

from exact.play import Batch, Play

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Line = dict[str, Any]
NEVER = 1 << 62


class Worker(Protocol):
    """The side of a KV connector that transfers blocks."""

    def run(self, step: int, batch: Batch) -> Any:
        """Return the connector's part of the output of a batch."""

    def on_aborted(self, names: list[str], when: str) -> None:
        """Note which requests were aborted before a schedule, or after it (`mid`)."""

    @property
    def busy(self) -> bool:
        """Whether steps go on after the last request."""


def steps_of(play: Play, worker: Worker | None = None) -> Iterator[tuple[int, Batch, list[str], list[Any]]]:
    """Yield each step: its number, schedule, aborted requests, and the outputs of its update.

    A step has arrivals, aborts, the schedule, aborts again, and the update of this schedule, or of the one before
    where vLLM schedules ahead.
    """
    coming = sorted(play.scenario["requests"], key=lambda request: request.get("arrival_step", NEVER))
    in_flight: tuple[Batch, Any] | None = None
    for number in range(play.scenario["max_steps"]):
        while coming and coming[0].get("arrival_step", NEVER) <= number:
            play.add(coming.pop(0))
        before = play.abort_due(number, "before")
        if worker is not None:
            worker.on_aborted(before, "before")
        batch = play.schedule()
        mid = play.abort_due(number, "mid")
        if worker is not None:
            worker.on_aborted(mid, "mid")
        due: tuple[Batch, Any] | None = (batch, None if worker is None else worker.run(number, batch))
        if play.config["async_scheduling"]:
            due, in_flight = in_flight, due
        yield number, batch, before + mid, play.update(*due) if due is not None else []
        if not coming and not play.scheduler.has_unfinished_requests() and not (worker and worker.busy):
            return


class StepLines:
    """Lines and totals of a recording by steps."""

    def __init__(self, play: Play) -> None:
        self.lines: list[Line] = []
        self.totals = dict.fromkeys(("finished", "preemptions", "scheduled_tokens", "cached_tokens"), 0)
        self._play = play

    def add(self, number: int, batch: Batch, aborted: list[str], answers: list[Any]) -> Line:
        """Add the line of a step and return it."""
        play, waiting = self._play, self._play.waiting
        line = {
            "step": number,
            "scheduled": batch.scheduled,
            "new": batch.new,
            "cached": batch.cached,
            "resumed": batch.resumed,
            "preempted": batch.preempted,
            "finished": [answer.request_id for answer in answers if answer.finish_reason is not None],
            "running": play.running,
            "waiting": len(waiting),
            "waiting_head": waiting[:4],
            "free_blocks": play.pool.get_num_free_blocks(),
            "free_after_schedule": batch.free_blocks,
            "free_head": [block.block_id for block in play.pool.free_block_queue.get_all_free_blocks()[:4]],
            "kv_events": play.take_events(),
        }
        self.totals["finished"] += len(line["finished"]) + len(aborted)
        self.totals["preemptions"] += len(batch.preempted)
        self.totals["scheduled_tokens"] += sum(batch.scheduled.values())
        self.totals["cached_tokens"] += sum(batch.cached.values())
        self.lines.append(line)
        return line

    def end(self, *, busy: bool = False) -> Line:
        """Return the totals; `busy`: transfers were left when the steps ended."""
        done = self.totals["finished"] == len(self._play.scenario["requests"]) and not busy
        names = self._play.names
        moved = {"stored_blocks": names.stored, "removed_blocks": names.removed}
        reason = "done" if done else "max_steps"
        return {"reason": reason, "steps": len(self.lines), **self.totals, **moved}


def record_steps(scenario: Line, model: Path) -> Line:
    """Record a scenario; `recorded` has the header, a line per step, and the totals."""
    play = Play(scenario, model)
    steps = StepLines(play)
    for number, batch, aborted, answers in steps_of(play):
        line = steps.add(number, batch, aborted, answers)
        if scenario.get("aborts") is not None:
            line["aborted"] = aborted
    return {"recorded": [{"header": header_of(play)}, *steps.lines, {"end": steps.end()}]}


def record_speculation(scenario: Line, model: Path) -> Line:
    """Record a scenario with speculation: `recorded` has a line per step, `events` a list of KV events per step."""
    play = Play(scenario, model)
    lines: list[Line] = []
    events: list[list[Any]] = []
    for number, batch, _, answers in steps_of(play):
        lines.append(
            {
                "step": number,
                "scheduled": batch.scheduled,
                "drafts": batch.drafts,
                "cached": {name: batch.cached[name] for name in batch.new},
                "emitted": {a.request_id: len(a.new_token_ids) for a in answers if a.new_token_ids},
                "running": play.running,
                "waiting": len(play.waiting),
                "free_after_schedule": batch.free_blocks,
                "free_blocks": play.pool.get_num_free_blocks(),
            }
        )
        events.append(list(play.take_events()))
    return {"recorded": lines, "events": events}


def header_of(play: Play) -> Line:
    """Return the header of a recording."""
    return {
        "format": 1,
        "scenario": play.scenario["name"],
        "vllm": f"v{vllm.__version__}",
        "config": play.config,
        "requests": len(play.scenario["requests"]),
        "max_steps": play.scenario["max_steps"],
    }

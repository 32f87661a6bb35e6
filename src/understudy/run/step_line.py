"""A step of an engine as a line of a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import EventBatch, VllmEngine

TOTALS = ("finished", "preemptions", "scheduled_tokens", "cached_tokens", "stored_blocks", "removed_blocks")


class RecordedEvents:
    """Format events for a recording: hashes become numbers in the order of their first stored event."""

    def __init__(self, block_size: int, first_tokens: dict[int, int | None] | None = None) -> None:
        self.first_tokens = {} if first_tokens is None else first_tokens  # by sequence hash
        self.tokens_ahead: dict[int, list[int]] = {}
        """Tokens behind a block that are part of its key, by sequence hash."""
        self._block_size = block_size
        self._numbers: dict[int, int] = {}

    @property
    def numbers(self) -> dict[int, int]:
        """Numbers of all sequence hashes in stored events."""
        return self._numbers

    def describe(self, batch: EventBatch) -> list[dict[str, Any]]:
        """Format the batch's device events; consecutive removals are merged."""
        events: list[dict[str, Any]] = []
        hashes = batch.sequence_hashes.tolist()
        parents = batch.parent_hashes.tolist()
        positions = batch.positions.tolist()
        starts = batch.starts.tolist()
        tiers = batch.tiers.tolist()
        for row, kind in enumerate(batch.kinds.tolist()):
            if tiers[row] != 1:
                continue
            value = hashes[row]
            if kind == 1:
                if not events or events[-1]["type"] != "removed":
                    events.append({"type": "removed", "n": 0, "h": []})
                events[-1]["h"].append(self._numbers[value])
            else:
                number = self._numbers.setdefault(value, len(self._numbers))
                if starts[row]:
                    events.append(
                        {
                            "type": "stored",
                            "n": 0,
                            "h": [],
                            "parent": self._numbers[parents[row]] if positions[row] else None,
                            "pos": positions[row] * self._block_size,
                            "first_tokens": [],
                        }
                    )
                    if self.tokens_ahead:
                        events[-1]["lookahead"] = []
                events[-1]["h"].append(number)
                events[-1]["first_tokens"].append(self.first_tokens[value])
                if self.tokens_ahead:
                    events[-1]["lookahead"].append(self.tokens_ahead[value])
            events[-1]["n"] += 1
        return events


class StepRecorder:
    """Write the steps of one engine as lines of a recording. Call `ended` after every recorded step.

    Unless `keep_events` is set, it takes the events from the engine, which would otherwise keep all of them. Recorders
    of engines that share a tier share `first_tokens`, because one engine loads blocks that another has computed.
    """

    def __init__(
        self,
        block_size: int,
        asynchronous: bool,
        *,
        keep_events: bool = False,
        first_tokens: dict[int, int | None] | None = None,
    ) -> None:
        self.steps = 0
        self.totals = dict.fromkeys(TOTALS, 0)
        self._events = RecordedEvents(block_size, first_tokens)
        self._asynchronous = asynchronous
        self._keep_events = keep_events

    @property
    def first_tokens(self) -> dict[int, int | None]:
        """First token of every block by sequence hash; the caller fills it before a block is stored."""
        return self._events.first_tokens

    @property
    def numbers(self) -> dict[int, int]:
        """Numbers of all sequence hashes so far."""
        return self._events.numbers

    def ended(self, engine: VllmEngine) -> dict[str, Any]:
        """The line of the step."""
        # Asynchronously the first schedule is followed by no update, so its events wait for the next.
        events = [] if self._asynchronous and self.steps == 0 else self._describe_events(engine)
        line = describe_step(engine, self.steps, events)
        self.steps += 1
        totals = self.totals
        totals["finished"] += len(line["finished"])
        totals["preemptions"] += len(line["preempted"])
        totals["scheduled_tokens"] += sum(line["scheduled"].values())
        totals["cached_tokens"] += sum(line["cached"].values())
        for event in events:
            totals[f"{event['type']}_blocks"] += event["n"]
        return line

    def _describe_events(self, engine: VllmEngine) -> list[dict[str, Any]]:
        lines = self._events.describe(engine.peek_events())
        if not self._keep_events:
            engine.take_events()
        return lines


def end_line(reason: str, recorders: Sequence[StepRecorder]) -> dict[str, Any]:
    """Build the last line of a recording: totals over all engines."""
    totals = {name: sum(recorder.totals[name] for recorder in recorders) for name in TOTALS}
    return {"end": {"reason": reason, "steps": sum(recorder.steps for recorder in recorders), **totals}}


def describe_step(engine: VllmEngine, step: int, events: list[dict[str, Any]]) -> dict[str, Any]:
    """Format the last step as a line of a recording."""
    name = engine.name
    new = [(name(r), cached) for r, resumed, cached in engine.admitted if not resumed]
    again = [(name(r), cached) for r, resumed, cached in engine.admitted if resumed]
    return {
        "step": step,
        "scheduled": {name(r): tokens for r, tokens in engine.scheduled},
        "new": [request for request, _ in new],
        "cached": dict(new + again),
        "resumed": [request for request, _ in again],
        "preempted": [name(r) for r in engine.preempted],
        "finished": [name(r) for r in engine.finished],
        "running": [name(r) for r in engine.running],
        "waiting": engine.num_waiting,
        "waiting_head": [name(r) for r in engine.waiting_head(4)],
        "free_blocks": engine.free_blocks,
        "free_after_schedule": engine.free_after_schedule,
        # vLLM counts its reserved block 0.
        "free_head": [block + 1 for block in engine.free_head(4)],
        "kv_events": events,
    }

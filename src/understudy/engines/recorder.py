"""Runs a scenario through the engine and tells every step in the words of a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy._core import Engine, EventBatch, constant_timing
from understudy.engines.scenario import DEFAULT_PROFILE, Scenario, blocks_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.engines.profiles import VersionProfile

STEP_NS = 1_000_000


class KvEventLog:
    """Events in a recording's form: hashes become numbers in the order in which stored events first name them."""

    def __init__(self, block_size: int) -> None:
        self.first_tokens: dict[int, int] = {}  # by sequence hash
        self._block_size = block_size
        self._numbers: dict[int, int] = {}

    def describe(self, batch: EventBatch) -> list[dict[str, Any]]:
        """The batch as stored and removed events; neighbouring removals are one."""
        events: list[dict[str, Any]] = []
        hashes = batch.sequence_hashes.tolist()
        parents = batch.parent_hashes.tolist()
        positions = batch.positions.tolist()
        starts = batch.starts.tolist()
        for row, kind in enumerate(batch.kinds.tolist()):
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
                events[-1]["h"].append(number)
                events[-1]["first_tokens"].append(self.first_tokens[value])
            events[-1]["n"] += 1
        return events


def run_scenario(
    scenario: Scenario, profile: VersionProfile = DEFAULT_PROFILE, *, check: bool = False
) -> Iterator[dict[str, Any]]:
    """The lines of the scenario's recording after the header: one a step, then the totals.

    With `check`, the engine verifies its invariants after every step.
    """
    config = scenario.config
    engine = Engine(config.engine_config(profile), constant_timing(1.0, 1.0))
    names: list[str] = []
    log = KvEventLog(config.block_size)
    to_come = list(enumerate(scenario.requests))
    totals = dict.fromkeys(
        ["finished", "preemptions", "scheduled_tokens", "cached_tokens", "stored_blocks", "removed_blocks"], 0
    )
    step = 0
    while totals["finished"] < len(scenario.requests) and step < scenario.max_steps:
        for index, request in to_come:
            if request.arrival_step > step:
                continue
            tokens = request.tokens(index, config.max_model_len)
            identities, firsts = blocks_of(tokens, config.block_size)
            log.first_tokens.update(firsts)
            engine.submit(
                request.id,
                len(request.prompt_tokens()),
                request.max_tokens,
                identities,
                priority=request.priority,
                arrival_time=index if request.arrival_time is None else request.arrival_time,
            )
            names.append(request.id)
        to_come = [(index, request) for index, request in to_come if request.arrival_step > step]

        engine.begin_step(step * STEP_NS)
        # Asynchronously the first schedule is followed by no update, so its events wait for the next.
        events = log.describe(engine.drain_events()) if config.async_scheduling and step > 0 else []
        engine.end_step((step + 1) * STEP_NS)
        if not config.async_scheduling:
            events = log.describe(engine.drain_events())
        if check:
            engine.check()
        line = _describe_step(engine, step, names, events)
        totals["finished"] += len(line["finished"])
        totals["preemptions"] += len(line["preempted"])
        totals["scheduled_tokens"] += sum(line["scheduled"].values())
        totals["cached_tokens"] += sum(line["cached"].values())
        for event in events:
            totals[f"{event['type']}_blocks"] += event["n"]
        step += 1
        yield line
    reason = "done" if totals["finished"] == len(scenario.requests) else "max_steps"
    yield {"end": {"reason": reason, "steps": step, **totals}}


def _describe_step(
    engine: Engine, step: int, names: list[str], events: list[dict[str, Any]]
) -> dict[str, Any]:
    new = [(names[r], cached) for r, resumed, cached in engine.admitted if not resumed]
    again = [(names[r], cached) for r, resumed, cached in engine.admitted if resumed]
    return {
        "step": step,
        "scheduled": {names[r]: tokens for r, tokens in engine.scheduled},
        "new": [name for name, _ in new],
        "cached": dict(new + again),
        "resumed": [name for name, _ in again],
        "preempted": [names[r] for r in engine.preempted],
        "finished": [names[r] for r in engine.finished],
        "running": [names[r] for r in engine.running],
        "waiting": engine.num_waiting,
        "waiting_head": [names[r] for r in engine.waiting_head(4)],
        "free_blocks": engine.free_blocks,
        "free_after_schedule": engine.free_after_schedule,
        # vLLM counts its reserved block 0.
        "free_head": [block + 1 for block in engine.free_head(4)],
        "kv_events": events,
    }

"""Recordings of vLLM's native host offload with several KV cache groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy._core import Tier
from understudy.conformance.group_recording import COUNTS, GroupRun, GroupScenarioConfig
from understudy.conformance.offload_recording import HostRecorder, LockstepOffload, OffloadRequest
from understudy.conformance.recorder import Aborts
from understudy.workload.scenario import ScenarioAbort  # noqa: TC001  (msgspec reads the annotation)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy._core import VllmOffload
    from understudy.engines.offload_profiles import OffloadProfile
    from understudy.engines.profiles import VersionProfile

Line = dict[str, Any]
LEFT_OUT = ("blocks", "host_events")
"""Keys of a host's line that these recordings do not have; some have `host_events`, of all groups."""


class GroupOffloadScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload by steps, for an engine with several KV cache groups and a host."""

    config: GroupScenarioConfig
    offload: LockstepOffload
    max_steps: int
    requests: list[OffloadRequest]
    name: str = ""
    aborts: list[ScenarioAbort] = []


class GroupOffloadRun:
    """A scenario on a new engine. `halted_at`: the first step of a halt that lasts to the end, if any.

    With `host_events`, lines have the events that an equal engine publishes for its host.
    """

    def __init__(
        self,
        scenario: GroupOffloadScenario,
        profile: VersionProfile,
        rules: OffloadProfile,
        *,
        check: bool = False,
        host_events: bool = False,
    ) -> None:
        self.scenario = scenario
        self.halted_at: int | None = None
        self._run = GroupRun(scenario, profile, offload=scenario.offload.native(rules))
        self._host = HostRecorder(scenario.config.async_scheduling)
        self._numbers: dict[str, int] = {}
        self._check = check
        self._publisher = (
            _Publisher(scenario, profile, scenario.offload.native(rules)) if host_events else None
        )

    def lines(self) -> Iterator[Line]:
        """Yield the recording's lines after its header: one per step, then the totals. Call it once."""
        engine, host, requests = self._run.engine, self._host, self.scenario.requests
        aborts = Aborts(engine, self._numbers, self.scenario.aborts)
        totals = dict.fromkeys(COUNTS, 0)
        to_come = list(enumerate(requests))
        lines: list[Line] = []
        while (totals["finished"] < len(requests) or engine.offload_pending) and len(
            lines
        ) < self.scenario.max_steps:
            step = len(lines)
            for index, request in to_come:
                if request.arrival_step <= step:
                    self._numbers[request.id] = number = self._run.submit(index, request)
                    host.names[number] = request.id
                    if self._publisher is not None:
                        self._publisher.submit(index, request)
            to_come = [(index, request) for index, request in to_come if request.arrival_step > step]
            aborted = host.run_step(engine, aborts, step, check=self._check)
            line = {**self._run.describe(step, totals), "aborted": aborted}
            totals["finished"] += len(aborted)
            line |= {key: value for key, value in host.describe_step(engine).items() if key not in LEFT_OUT}
            if self._publisher is not None:
                line["host_events"] = self._publisher.run_step(step)
            lines.append(line)
            self.halted_at = (step if self.halted_at is None else self.halted_at) if engine.stuck else None
        _number_by_naming(lines)
        yield from lines
        done = totals["finished"] >= len(requests) and not engine.offload_pending
        ends = {"reason": "done" if done else "max_steps", "steps": len(lines)}
        ends |= {name: totals[name] for name in COUNTS if name != "copies"}
        yield {"end": ends | host.totals(lines)}


class _Publisher:
    """Run a scenario once more, on an engine that publishes its events."""

    def __init__(self, scenario: GroupOffloadScenario, profile: VersionProfile, offload: VllmOffload) -> None:
        self._run = GroupRun(scenario, profile, offload=offload, group_events=False)
        self._host = HostRecorder(scenario.config.async_scheduling)
        self._numbers: dict[str, int] = {}
        self._aborts = Aborts(self._run.engine, self._numbers, scenario.aborts)
        self._asynchronous = scenario.config.async_scheduling

    def submit(self, index: int, request: OffloadRequest) -> None:
        """Submit a request of the scenario."""
        self._numbers[request.id] = number = self._run.submit(index, request)
        self._host.names[number] = request.id

    def run_step(self, step: int) -> list[Line]:
        """Run a step and return the host's events, with the hashes of their chunks."""
        engine = self._run.engine
        self._host.run_step(engine, self._aborts, step, check=False)
        engine.take_offload_line()
        # Asynchronously the first schedule is followed by no update, so its events wait for the next.
        if self._asynchronous and step == 0:
            return []
        batch = engine.peek_events()
        engine.take_events()
        events: list[Line] = []
        columns = (batch.tiers, batch.kinds, batch.groups, batch.starts, batch.sequence_hashes)
        for tier, kind, group, starts, chunk in zip(*(column.tolist() for column in columns), strict=True):
            if tier == Tier.G1:
                continue
            if kind != 1:
                events.append({"type": "stored", "g": group, "h": [chunk]})
            elif starts or not events or events[-1]["type"] != "removed":
                events.append({"type": "removed", "g": group, "h": [chunk]})
            else:
                events[-1]["h"].append(chunk)
        return events


def _number_by_naming(lines: list[Line]) -> None:
    """Replace hashes by numbers in the order in which transfers, evictions and the host's order name them."""
    numbers: dict[int, int] = {}

    def number(hashes: list[int]) -> list[int]:
        return [numbers.setdefault(value, len(numbers)) for value in hashes]

    for line in lines:
        for job in line["loads"] + line["stores"]:
            job["h"] = number(job["h"])
            job.pop("table", None)
        line["evicted"] = number(line["evicted"])
        for event in line.get("host_events", ()):
            event["h"] = number(event["h"])
        if line["host_lru"] is not None:
            line["host_lru"] = number(line["host_lru"])

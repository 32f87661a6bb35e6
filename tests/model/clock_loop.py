"""vLLM's engine loop on a clock, slow and obvious: a queue of two batches before a device that runs one at a time.

Asynchronously the loop fills its queue before it waits: it schedules, hands the batch to the device, and only with two
batches in the queue (or nobody left to schedule) waits for the older one. Synchronously it waits for every batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .vllm_scheduler import VllmModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .vllm_config import Profile
    from .vllm_requests import Plan

DEPTH = 2


@dataclass
class Seen:
    """When each request had its first and last token, how many it had, and every batch that computed something."""

    first: dict[str, int] = field(default_factory=dict)
    last: dict[str, int] = field(default_factory=dict)
    n: dict[str, int] = field(default_factory=dict)
    trace: list[tuple[int, int, dict[str, int]]] = field(default_factory=list)


class ClockLoop:
    """Plays a scenario in which requests arrive and are aborted at times `t`."""

    def __init__(self, scenario: Mapping[str, Any], profile: Profile) -> None:
        self.scenario = scenario
        self.model = VllmModel(scenario["config"], profile)
        self.to_come = sorted(enumerate(scenario["requests"]), key=lambda entry: entry[1]["t"])
        self.aborts = sorted(scenario.get("aborts", []), key=lambda abort: abort["t"])
        self.now = 0
        self.device_free = 0
        self.queue: deque[tuple[Plan, int]] = deque()  # with the time at which its tokens are there
        self.seen = Seen()
        self.depth = DEPTH if self.model.config.async_scheduling else 1

    def run(self) -> Seen:
        while True:
            self._read_arrivals()
            self._read_aborts()
            if self._has_requests():
                changed = self._schedule()
                if self._stands_still(changed=changed):
                    # Nobody fits and nothing is under way: so it stays until somebody comes or goes.
                    self.queue.clear()
                    if not self._wait_for_input():
                        return self.seen
                    continue
                if len(self.queue) < self.depth:
                    continue
            elif not self.queue:
                if not self._wait_for_input():
                    return self.seen
                continue
            self._receive()

    def _stands_still(self, *, changed: bool) -> bool:
        return not changed and not any(plan.scheduled for plan, _ in self.queue)

    def _has_requests(self) -> bool:
        return bool(self.model.running or self.model.waiting)

    def _schedule(self) -> bool:
        """Whether it changed anything."""
        plan = self.model._schedule()
        tokens = {request.id: count for request, count in plan.scheduled.items()}
        ready = self.now
        if tokens:
            start = max(self.now, self.device_free)
            ready = start + self.scenario["step_ns"] + self.scenario["per_token_ns"] * sum(tokens.values())
            self.device_free = ready
            self.seen.trace.append((start, ready, tokens))
        self.queue.append((plan, ready))
        return bool(tokens or plan.preempted)

    def _receive(self) -> None:
        plan, ready = self.queue.popleft()
        self.now = max(self.now, ready)
        self._read_aborts()
        before = {request: request.outputs() for request in plan.scheduled}
        self.model._update(plan)
        for request, had in before.items():
            if fresh := request.outputs() - had:
                self.seen.first.setdefault(request.id, self.now)
                self.seen.last[request.id] = self.now
                self.seen.n[request.id] = self.seen.n.get(request.id, 0) + fresh

    def _read_arrivals(self) -> None:
        while self.to_come and self.to_come[0][1]["t"] <= self.now:
            index, request = self.to_come.pop(0)
            self.model.add(request, index)

    def _read_aborts(self) -> None:
        # When a batch ends, somebody may be aborted whom the loop has not read yet: it is, once it has been.
        unread = {request["id"] for _, request in self.to_come}
        due = [abort for abort in self.aborts if abort["t"] <= self.now and abort["id"] not in unread]
        self.aborts = [abort for abort in self.aborts if abort not in due]
        for abort in due:
            if self.model.has(abort["id"]):
                self.model.cancel(abort["id"])

    def _wait_for_input(self) -> bool:
        times = [request["t"] for _, request in self.to_come[:1]]
        times += [abort["t"] for abort in self.aborts[:1] if self._has_requests()]
        if not times:
            return False
        self.now = max(self.now, min(times))
        return True

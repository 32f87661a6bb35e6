"""Record scenarios on a clock: vLLM's engine loop with up to two batches in its queue."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from exact.play import Batch, Play

if TYPE_CHECKING:
    from pathlib import Path

Line = dict[str, Any]
MOST = 20_000
"""Schedules of a scenario; one that takes more makes no progress."""


def record_clock(scenario: Line, model: Path) -> Line:
    """Record a scenario: times of first and last tokens, numbers of tokens, and every batch."""
    return {"recorded": _Loop(scenario, model).run()}


class _Loop:
    def __init__(self, scenario: Line, model: Path) -> None:
        self._scenario = scenario
        self._play = Play(scenario, model)
        self._coming = sorted(scenario["requests"], key=lambda request: request["t"])
        self._aborts = sorted(scenario.get("aborts") or (), key=lambda abort: abort["t"])
        self._now = 0
        self._device_free = 0
        self._schedules = 0
        self._queue: deque[tuple[Batch, int]] = deque()  # with the time at which its tokens are there
        self._seen: Line = {"first": {}, "last": {}, "n": {}, "steps": 0, "trace": []}

    def run(self) -> Line:
        depth = 2 if self._play.config["async_scheduling"] else 1
        while True:
            self._read_input()
            if self._play.scheduler.has_unfinished_requests():
                changed = self._schedule()
                if not changed and not any(batch.scheduled for batch, _ in self._queue):
                    # No request fits and none is in flight: only a new request or an abort changes that.
                    while self._queue:
                        self._receive()
                    if not self._wait_for_input():
                        return self._seen
                    continue
                if len(self._queue) < depth:
                    continue
            elif not self._queue:
                if not self._wait_for_input():
                    return self._seen
                continue
            self._receive()

    def _schedule(self) -> bool:
        """Schedule a batch; return whether it has tokens or preempted a request."""
        self._schedules += 1
        if self._schedules > MOST:
            raise RuntimeError(f"no end after {MOST} schedules")
        batch = self._play.schedule()
        ready = self._now
        if batch.scheduled:
            start = max(self._now, self._device_free)
            tokens = sum(batch.scheduled.values())
            ready = start + self._scenario["step_ns"] + self._scenario["per_token_ns"] * tokens
            self._device_free = ready
            self._seen["trace"].append([start, ready, batch.scheduled])
            self._seen["steps"] += 1
        self._queue.append((batch, ready))
        return bool(batch.scheduled or batch.preempted)

    def _receive(self) -> None:
        batch, ready = self._queue.popleft()
        self._now = max(self._now, ready)
        self._read_aborts()
        for answer in self._play.update(batch):
            if answer.new_token_ids:
                name = answer.request_id
                self._seen["first"].setdefault(name, self._now)
                self._seen["last"][name] = self._now
                self._seen["n"][name] = self._seen["n"].get(name, 0) + len(answer.new_token_ids)

    def _read_input(self) -> None:
        while self._coming and self._coming[0]["t"] <= self._now:
            self._play.add(self._coming.pop(0))
        self._read_aborts()

    def _read_aborts(self) -> None:
        # An abort of a request that the loop has not read yet waits for it.
        unread = {request["id"] for request in self._coming}
        due = [abort for abort in self._aborts if abort["t"] <= self._now and abort["id"] not in unread]
        self._aborts = [abort for abort in self._aborts if abort not in due]
        for abort in due:
            self._play.abort(abort["id"])

    def _wait_for_input(self) -> bool:
        times = [request["t"] for request in self._coming[:1]]
        if self._play.scheduler.has_unfinished_requests():
            times += [abort["t"] for abort in self._aborts[:1]]
        if times:
            self._now = max(self._now, min(times))
        return bool(times)

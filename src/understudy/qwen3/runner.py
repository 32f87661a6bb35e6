"""Run a workload on an engine, real or simulated, and record its steps and outputs."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from understudy.errors import InvalidArgument, WrongState
from understudy.qwen3.load import count_shared_tokens
from understudy.server.clock import WallClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.qwen3.engine import Engine
    from understudy.qwen3.host import Copy
    from understudy.qwen3.plan import Plan
    from understudy.qwen3.request import FinishReason, Request
    from understudy.server.clock import WaitingClock


class VirtualClock:
    """Virtual clock, whose time is set by its users."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def wait_until(self, ms: float) -> None:
        """Advance to that time."""
        self.now_ms = max(self.now_ms, ms)


class RecordedClock(VirtualClock):
    """Virtual clock that stops only at the times at which the recorded engine polled."""

    def __init__(self, polls: Sequence[float]) -> None:
        super().__init__()
        self._polls = polls

    def wait_until(self, ms: float) -> None:
        """Advance to the first recorded poll from that time on. WrongState when there is none."""
        at = bisect_left(self._polls, max(ms, self.now_ms))
        if at == len(self._polls):
            raise WrongState(f"the recording has nothing after {self.now_ms:.3f} ms")
        self.now_ms = self._polls[at]


@dataclass(slots=True)
class RunRecord:
    """Record of a run: its steps, and the times of each request's tokens."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """`chunks` as [request, tokens, history], `decodes` as [request, context]; `ms` from `at_ms`, when arrivals were
    polled, to the next poll; `launch_ms` of it before the previous step's outputs were reported; `shared` tokens of
    contexts are on pages that another context also has; `ahead` if the step was prepared by lookahead."""
    polls: list[float] = field(default_factory=list)
    """Times (ms) of polls with a result: an arrival, the end of a copy, a step to begin."""
    copies: list[float] = field(default_factory=list)
    """Times (ms) at which the end of each copy was detected, in the order in which they began."""
    arrival_ms: dict[str, float] = field(default_factory=dict)
    queued_ms: dict[str, float] = field(default_factory=dict)
    admitted_ms: dict[str, float] = field(default_factory=dict)
    first_ms: dict[str, float] = field(default_factory=dict)
    second_ms: dict[str, float] = field(default_factory=dict)
    last_ms: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    ended: dict[str, tuple[FinishReason, str | None]] = field(default_factory=dict)
    gaps_ns: Counter[int] = field(default_factory=Counter)
    """Number of gaps between consecutive tokens of a request by length (ns)."""
    samples: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """Time (ns) and result of `sample` for each step."""

    @property
    def decisions(self) -> str:
        """Digest of the requests and tokens of all steps."""
        plain = [(step["chunks"], step["decodes"]) for step in self.steps]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]

    @property
    def ttft_ms(self) -> list[float]:
        """Time from arrival to first token of each request."""
        return [self.first_ms[name] - self.arrival_ms[name] for name in self.first_ms]

    @property
    def tpot_ms(self) -> list[float]:
        """Mean time between tokens of each request with several."""
        several = [name for name, count in self.tokens.items() if count > 1]
        return [(self.last_ms[n] - self.first_ms[n]) / (self.tokens[n] - 1) for n in several]

    @property
    def mean_ttft_ms(self) -> float:
        """Each request counted once."""
        return sum(self.ttft_ms) / len(self.first_ms)

    @property
    def mean_tpot_ms(self) -> float:
        """Each request counted once."""
        return sum(self.tpot_ms) / len(self.tpot_ms)


def run_workload(
    engine: Engine,
    workload: Sequence[tuple[float, Request]],
    clock: WaitingClock,
    progress: Callable[[int], None] | None = None,
    *,
    follow: Callable[[str, float], tuple[float, Request] | None] | None = None,
    sample: Callable[[], tuple[int, int, int, int]] | None = None,
) -> RunRecord:
    """Submit each request at its time (ms, ascending), and step until all have ended.

    `follow` may return a request that follows the end of another; `sample` is called at every step.

    A step lasts from one poll for arrivals to the next; an engine with these durations makes the same decisions.
    """
    if any(a[0] > b[0] for a, b in itertools.pairwise(workload)):
        raise InvalidArgument("arrivals must ascend")
    runner = _WorkloadRunner(engine, workload, clock, progress)
    runner.follow, runner.sample = follow, sample
    host = None if engine.scheduler.restores is None else engine.scheduler.restores.host
    engine.on_step = runner.on_step
    if host is not None:
        host.on_copy = runner.on_copy
    try:
        runner.run(None if host is None else lambda: host.copier.next_ms)
    finally:
        engine.on_step = None
        if host is not None:
            host.on_copy = None
    runner.record.polls = sorted(runner.found)
    return runner.record


def measure(
    engine: Engine, workload: Sequence[tuple[float, Request]], progress: Callable[[int], None] | None = None
) -> RunRecord:
    """Run on the wall clock with garbage collection off, because the large record would make it slow."""
    gc.collect()
    gc.disable()
    try:
        return run_workload(engine, workload, WallClock(), progress)
    finally:
        gc.enable()


@dataclass(slots=True)
class _RecordedStep:
    plan: Plan
    at_ms: float
    launch_ms: float
    until_ms: float | None = None

    def to_row(self) -> dict[str, Any]:
        plan, step = self.plan, self.plan.step
        rows = zip(plan.chunks, step.chunks, strict=True)
        pairs = zip(plan.decodes, step.decodes, strict=True)
        row = {
            "at_ms": self.at_ms,
            "ms": None if self.until_ms is None else self.until_ms - self.at_ms,
            "launch_ms": self.launch_ms,
            "shared": count_shared_tokens([decode.view for decode in step.decodes]),
            "ahead": step.ahead,
            "chunks": [
                [r.id, len(chunk.tokens), chunk.view.seq_len - len(chunk.tokens)] for r, chunk in rows
            ],
            "decodes": [[request.id, decode.view.seq_len] for request, decode in pairs],
        }
        return row if self.until_ms is None else {**row, "until_ms": self.until_ms}


class _WorkloadRunner:
    def __init__(
        self,
        engine: Engine,
        workload: Sequence[tuple[float, Request]],
        clock: WaitingClock,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.record = RunRecord()
        self.found: set[float] = set()
        self._engine, self._clock, self._progress = engine, clock, progress
        self._queue = list(reversed(workload))
        self._began_ms = clock.now_ms
        self._launch_ms = 0.0
        self.follow: Callable[[str, float], tuple[float, Request] | None] | None = None
        self.sample: Callable[[], tuple[int, int, int, int]] | None = None
        self._steps: list[_RecordedStep] = []

    def run(self, next_copy_end: Callable[[], float | None] | None) -> None:
        engine, queue, clock = self._engine, self._queue, self._clock
        while queue or not engine.idle:
            if engine.idle:
                clock.wait_until(queue[-1][0])
            elif (
                engine.waits_for_pages
                and next_copy_end is not None
                and (next_ms := next_copy_end()) is not None
            ):
                clock.wait_until(min(next_ms, queue[-1][0]) if queue else next_ms)
            outputs = engine.step(self._poll)
            now_ms = clock.now_ms
            self._launch_ms = now_ms - self._began_ms if outputs and engine.running else 0.0
            self._record_outputs(outputs, now_ms)
        self.record.steps = [step.to_row() for step in self._steps]

    def on_step(self, plan: Plan) -> None:
        """Record a computed step; its row is built later, because the device waits for the next step."""
        self._steps.append(_RecordedStep(plan, self._began_ms, self._launch_ms))
        if self.sample is not None:
            self.record.samples.append((round(self._began_ms * 1e6), *self.sample()))
        self._launch_ms = 0.0
        self.found.add(self._began_ms)
        for request in plan.chunks:
            self.record.admitted_ms.setdefault(request.id, self._began_ms)

    def on_copy(self, copy: Copy) -> None:
        """Record when the end of a copy that begins now is first detected."""
        seen, done, number = self.record.copies, copy.done, len(self.record.copies)
        seen.append(float("inf"))

        def is_done() -> bool:
            if seen[number] == float("inf") and done():
                seen[number] = self._began_ms
                self.found.add(self._began_ms)
            return seen[number] < float("inf")

        copy.done = is_done

    def _poll(self) -> None:
        self._began_ms = now_ms = self._clock.now_ms
        if self._steps and self._steps[-1].until_ms is None:
            self._steps[-1].until_ms = now_ms
        while self._queue and self._queue[-1][0] <= now_ms:
            at_ms, request = self._queue.pop()
            self.record.arrival_ms[request.id] = at_ms
            self.record.queued_ms[request.id] = now_ms
            self.found.add(now_ms)
            self._engine.submit(request)

    def _record_outputs(self, outputs: Sequence[Any], now_ms: float) -> None:
        record = self.record
        for output in outputs:
            name = output.request_id
            if output.token is not None:
                count = record.tokens[name] = record.tokens.get(name, 0) + 1
                if count == 1:
                    record.first_ms[name] = now_ms
                elif count == 2:
                    record.second_ms[name] = now_ms
                if count > 1:
                    record.gaps_ns[round(now_ms * 1e6) - round(record.last_ms[name] * 1e6)] += 1
                record.last_ms[name] = now_ms
                record.cached[name] = output.cached_tokens
            if output.finish_reason is not None:
                record.ended[name] = (output.finish_reason, output.error)
                if self._progress is not None:
                    self._progress(len(record.ended))
                if self.follow is not None and (later := self.follow(name, now_ms)) is not None:
                    insort(self._queue, later, key=lambda row: -row[0])

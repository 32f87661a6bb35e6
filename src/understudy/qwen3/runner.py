"""Run a workload on an engine, real or simulated, and record its steps and outputs."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from understudy.clock import WallClock
from understudy.errors import InvalidArgument
from understudy.qwen3.live_engine import LiveEngine
from understudy.qwen3.load import count_shared_tokens
from understudy.server.core import EngineCore
from understudy.server.driver import Driver
from understudy.server.live_request import LiveRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.clock import Clock
    from understudy.qwen3.engine import Engine
    from understudy.qwen3.host import Copy
    from understudy.qwen3.plan import Plan
    from understudy.qwen3.request import FinishReason, Request
    from understudy.server.live_request import StepEffects


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
    workload: Sequence[tuple[int, Request]],
    clock: Clock,
    progress: Callable[[int], None] | None = None,
    *,
    follow: Callable[[str, int], tuple[int, Request] | None] | None = None,
    sample: Callable[[], tuple[int, int, int, int]] | None = None,
) -> RunRecord:
    """Submit each request at its time (ns, ascending), and step until all have ended. Requests get new ids.

    `follow` may return a request that follows the end of another; `sample` is called at every step.

    A step lasts from one poll for arrivals to the next; an engine with these durations makes the same decisions.
    """
    if any(a[0] > b[0] for a, b in itertools.pairwise(workload)):
        raise InvalidArgument("arrivals must ascend")
    recorder = _Recorder(engine, clock, progress, follow, sample)
    host = None if engine.scheduler.restores is None else engine.scheduler.restores.host
    engine.on_step = recorder.on_plan
    if host is not None:
        host.on_copy = recorder.on_copy
    try:
        return recorder.run(workload)
    finally:
        engine.on_step = None
        if host is not None:
            host.on_copy = None


def measure(
    engine: Engine, workload: Sequence[tuple[int, Request]], progress: Callable[[int], None] | None = None
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
    at_ns: int
    launch_ns: int
    until_ns: int | None = None

    def to_row(self, names: Sequence[str]) -> dict[str, Any]:
        plan, step = self.plan, self.plan.step
        rows = zip(plan.chunks, step.chunks, strict=True)
        pairs = zip(plan.decodes, step.decodes, strict=True)
        row = {
            "at_ms": self.at_ns / 1e6,
            "ms": None if self.until_ns is None else (self.until_ns - self.at_ns) / 1e6,
            "launch_ms": self.launch_ns / 1e6,
            "shared": count_shared_tokens([decode.view for decode in step.decodes]),
            "ahead": step.ahead,
            "chunks": [
                [names[int(r.id)], len(chunk.tokens), chunk.view.seq_len - len(chunk.tokens)]
                for r, chunk in rows
            ],
            "decodes": [[names[int(request.id)], decode.view.seq_len] for request, decode in pairs],
        }
        return row if self.until_ns is None else {**row, "until_ms": self.until_ns / 1e6}


class _IgnoreProgress:
    """Listener of requests whose progress is recorded by step."""

    def on_admitted(self, *_: object) -> None:
        pass

    on_tokens = on_end = on_error = on_admitted


class _WorkloadCore(EngineCore):
    """The engine of a run. A request's id in the engine is its index in `names`."""

    def __init__(self, live_engine: LiveEngine) -> None:
        manager = live_engine.real.scheduler.manager
        super().__init__(
            lambda: live_engine,
            name="qwen3",
            block_size=manager.layout.page_size,
            num_blocks=manager.total_blocks,
        )
        self.has_tiers = live_engine.real.scheduler.restores is not None
        self.names: list[str] = []
        self.specs: dict[LiveRequest, Request] = {}

    def make_spec(self, request: LiveRequest) -> Request:
        """Return the request of the workload, with its id in the engine."""
        self.names.append(request.name)
        spec = self.specs.pop(request)
        spec.id = f"{request.engine_id}"
        return spec


class _Recorder:
    """Runs a workload with the live driver, and records each step."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        progress: Callable[[int], None] | None,
        follow: Callable[[str, int], tuple[int, Request] | None] | None,
        sample: Callable[[], tuple[int, int, int, int]] | None,
    ) -> None:
        self.record = RunRecord()
        self._progress, self._follow, self._sample = progress, follow, sample
        self._driver = Driver(clock)
        self._live_engine = LiveEngine(engine, events=False)
        self._live_engine.on_poll = self._poll
        self._core = _WorkloadCore(self._live_engine)
        self._driver.observe(self._core, self)
        self._began_ns = clock.now_ns()
        self._launch_ns = 0
        self._polls_ns: set[int] = set()
        self._submitted: list[str] = []
        self._steps: list[_RecordedStep] = []

    def run(self, workload: Sequence[tuple[int, Request]]) -> RunRecord:
        """Run until all requests have ended."""
        for at_ns, spec in workload:
            self._submit_at(at_ns, spec)
        self._driver.run_until()
        self.record.steps = [step.to_row(self._core.names) for step in self._steps]
        self.record.polls = [poll_ns / 1e6 for poll_ns in sorted(self._polls_ns)]
        return self.record

    def on_plan(self, plan: Plan) -> None:
        """Record a computed step; its row is built later, because the device waits for the next step."""
        began_ns = self._began_ns
        self._steps.append(_RecordedStep(plan, began_ns, self._launch_ns))
        if self._sample is not None:
            self.record.samples.append((began_ns, *self._sample()))
        self._launch_ns = 0
        self._polls_ns.add(began_ns)
        for request in plan.chunks:
            self.record.admitted_ms.setdefault(self._core.names[int(request.id)], began_ns / 1e6)

    def on_copy(self, copy: Copy) -> None:
        """Record when the end of a copy that begins now is first detected."""
        seen, done, number = self.record.copies, copy.done, len(self.record.copies)
        seen.append(float("inf"))

        def is_done() -> bool:
            if seen[number] == float("inf") and done():
                seen[number] = self._began_ns / 1e6
                self._polls_ns.add(self._began_ns)
            return seen[number] < float("inf")

        copy.done = is_done

    def on_step(self, core: EngineCore, effects: StepEffects, now_ns: int) -> None:  # noqa: ARG002
        """Record the outputs of a step, and when they were reported."""
        outputs = self._live_engine.outputs
        reports_late = outputs and self._live_engine.real.running
        self._launch_ns = now_ns - self._began_ns if reports_late else 0
        record = self.record
        for output in outputs:
            name = self._core.names[int(output.request_id)]
            if output.token is not None:
                count = record.tokens[name] = record.tokens.get(name, 0) + 1
                if count == 1:
                    record.first_ms[name] = now_ns / 1e6
                elif count == 2:
                    record.second_ms[name] = now_ns / 1e6
                if count > 1:
                    record.gaps_ns[now_ns - round(record.last_ms[name] * 1e6)] += 1
                record.last_ms[name] = now_ns / 1e6
                record.cached[name] = output.cached_tokens
            if output.finish_reason is not None:
                record.ended[name] = (output.finish_reason, output.error)
                if self._progress is not None:
                    self._progress(len(record.ended))
                if self._follow is not None and (later := self._follow(name, now_ns)) is not None:
                    self._submit_at(*later)

    def on_landed(self, core: EngineCore) -> None:
        """Implement `Observer`."""

    def on_idle(self, core: EngineCore) -> None:
        """Implement `Observer`."""

    def _submit_at(self, at_ns: int, spec: Request) -> None:
        request = LiveRequest(spec.id, len(spec.tokens), spec.max_tokens, None, _IgnoreProgress())
        request.arrival_ns = at_ns
        self._core.specs[request] = spec

        def submit(now_ns: int) -> None:
            self._core.submit(request, now_ns)
            self.record.arrival_ms[request.name] = at_ns / 1e6
            self._submitted.append(request.name)

        self._driver.enqueue(self._core, submit, at_ns)

    def _poll(self) -> None:
        """Submit the requests that are due; they reach the engine when this returns."""
        self._began_ns = now_ns = self._driver.clock.now_ns()
        if self._steps and self._steps[-1].until_ns is None:
            self._steps[-1].until_ns = now_ns
        self._driver.run_until(now_ns + 1)
        if self._submitted:
            self._polls_ns.add(now_ns)
            self.record.queued_ms.update(dict.fromkeys(self._submitted, now_ns / 1e6))
            self._submitted.clear()

"""A workload on an engine, real or simulated: what was computed when, and what each request heard."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import time
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from understudy.errors import InvalidArgument, WrongState
from understudy.qwen3.load import shared_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.qwen3.engine import Engine
    from understudy.qwen3.host import Copy
    from understudy.qwen3.plan import Plan
    from understudy.qwen3.request import FinishReason, Request


class Clock(Protocol):
    """What `play` needs of time."""

    @property
    def now_ms(self) -> float:
        """Milliseconds since the run began."""

    def wait_until(self, ms: float) -> None:
        """Return when it is so late."""


class WallClock:
    """Milliseconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def now_ms(self) -> float:
        """See `Clock`."""
        return (time.perf_counter() - self._start) * 1e3

    def wait_until(self, ms: float) -> None:
        """Asleep, and awake for the last of it."""
        while (left := ms - self.now_ms) > 0:
            if left > 2:
                time.sleep((left - 1) / 1e3)


class VirtualClock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def wait_until(self, ms: float) -> None:
        """Let it become so late."""
        self.now_ms = max(self.now_ms, ms)


class RecordedClock(VirtualClock):
    """Looks up only when the recorded engine did."""

    def __init__(self, polls: Sequence[float]) -> None:
        super().__init__()
        self._polls = polls

    def wait_until(self, ms: float) -> None:
        """See `Clock`. WrongState when the recorded engine had ended by then."""
        at = bisect_left(self._polls, max(ms, self.now_ms))
        if at == len(self._polls):
            raise WrongState(f"the recording has nothing after {self.now_ms:.3f} ms")
        self.now_ms = self._polls[at]


@dataclass(slots=True)
class Played:
    """What a workload left: the steps, and when each request got its first and its last token."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    """`chunks` as [request, tokens, history], `decodes` as [request, context]; from `at_ms`, when arrivals were taken
    in, `ms` until they were again, of which `launch_ms` passed before outputs of the step before were told; `shared`
    tokens of contexts are on pages that another one has too; one that was prepared `ahead` found the device sooner."""
    polls: list[float] = field(default_factory=list)
    """When something was found on looking up: an arrival, the end of a copy, a step to begin."""
    copies: list[float] = field(default_factory=list)
    """When the end of each copy was seen, in the order in which they began."""
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
    """How often neighbouring tokens of a request were so far apart."""
    samples: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """Time (ns) and what was asked for at each step."""

    @property
    def decisions(self) -> str:
        """A digest of who computed what in which step."""
        plain = [(step["chunks"], step["decodes"]) for step in self.steps]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]

    @property
    def ttft_ms(self) -> list[float]:
        """Arrival to first token, of each request."""
        return [self.first_ms[name] - self.arrival_ms[name] for name in self.first_ms]

    @property
    def tpot_ms(self) -> list[float]:
        """Time between tokens after the first, of each request that had several."""
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


def play(
    engine: Engine,
    workload: Sequence[tuple[float, Request]],
    clock: Clock,
    progress: Callable[[int], None] | None = None,
    *,
    follow: Callable[[str, float], tuple[float, Request] | None] | None = None,
    sample: Callable[[], tuple[int, int, int, int]] | None = None,
) -> Played:
    """Submit each request at its time (ms, ascending), and step until all have ended.

    `follow` may name a request that comes because another has ended, and `sample` is asked at every step.

    A step lasts from the moment at which arrivals were taken in for it to the same moment of the next: whoever is given
    those durations makes the same decisions.
    """
    if any(a[0] > b[0] for a, b in itertools.pairwise(workload)):
        raise InvalidArgument("arrivals must ascend")
    player = _Player(engine, workload, clock, progress)
    player.follow, player.sample = follow, sample
    host = None if engine.scheduler.restores is None else engine.scheduler.restores.host
    engine.on_step = player.note
    if host is not None:
        host.on_copy = player.watch
    try:
        player.run(None if host is None else lambda: host.carrier.next_ms)
    finally:
        engine.on_step = None
        if host is not None:
            host.on_copy = None
    player.played.polls = sorted(player.found)
    return player.played


def measure(
    engine: Engine, workload: Sequence[tuple[float, Request]], progress: Callable[[int], None] | None = None
) -> Played:
    """Play it by the wall clock, undisturbed: what is recorded is much, and nobody looks through it for garbage."""
    gc.collect()
    gc.disable()
    try:
        return play(engine, workload, WallClock(), progress)
    finally:
        gc.enable()


@dataclass(slots=True)
class _Noted:
    plan: Plan
    at_ms: float
    launch_ms: float
    until_ms: float | None = None

    def row(self) -> dict[str, Any]:
        plan, step = self.plan, self.plan.step
        rows = zip(plan.chunks, step.chunks, strict=True)
        pairs = zip(plan.decodes, step.decodes, strict=True)
        row = {
            "at_ms": self.at_ms,
            "ms": None if self.until_ms is None else self.until_ms - self.at_ms,
            "launch_ms": self.launch_ms,
            "shared": shared_tokens([decode.view for decode in step.decodes]),
            "ahead": step.ahead,
            "chunks": [
                [r.id, len(chunk.tokens), chunk.view.seq_len - len(chunk.tokens)] for r, chunk in rows
            ],
            "decodes": [[request.id, decode.view.seq_len] for request, decode in pairs],
        }
        return row if self.until_ms is None else {**row, "until_ms": self.until_ms}


class _Player:
    def __init__(
        self,
        engine: Engine,
        workload: Sequence[tuple[float, Request]],
        clock: Clock,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.played = Played()
        self.found: set[float] = set()
        self._engine, self._clock, self._progress = engine, clock, progress
        self._queue = list(reversed(workload))
        self._began_ms = clock.now_ms
        self._launch_ms = 0.0
        self.follow: Callable[[str, float], tuple[float, Request] | None] | None = None
        self.sample: Callable[[], tuple[int, int, int, int]] | None = None
        self._noted: list[_Noted] = []

    def run(self, landing: Callable[[], float | None] | None) -> None:
        engine, queue, clock = self._engine, self._queue, self._clock
        while queue or not engine.idle:
            if engine.idle:
                clock.wait_until(queue[-1][0])
            elif engine.waits and landing is not None and (next_ms := landing()) is not None:
                clock.wait_until(min(next_ms, queue[-1][0]) if queue else next_ms)
            outputs = engine.step(self._poll)
            now_ms = clock.now_ms
            self._launch_ms = now_ms - self._began_ms if outputs and engine.running else 0.0
            self._tell(outputs, now_ms)
        self.played.steps = [noted.row() for noted in self._noted]

    def note(self, plan: Plan) -> None:
        """A step has been computed. The device waits for the next one: what the step was is written down later."""
        self._noted.append(_Noted(plan, self._began_ms, self._launch_ms))
        if self.sample is not None:
            self.played.samples.append((round(self._began_ms * 1e6), *self.sample()))
        self._launch_ms = 0.0
        self.found.add(self._began_ms)
        for request in plan.chunks:
            self.played.admitted_ms.setdefault(request.id, self._began_ms)

    def watch(self, copy: Copy) -> None:
        """A copy begins."""
        seen, done, number = self.played.copies, copy.done, len(self.played.copies)
        seen.append(float("inf"))

        def asked() -> bool:
            if seen[number] == float("inf") and done():
                seen[number] = self._began_ms
                self.found.add(self._began_ms)
            return seen[number] < float("inf")

        copy.done = asked

    def _poll(self) -> None:
        self._began_ms = now_ms = self._clock.now_ms
        if self._noted and self._noted[-1].until_ms is None:
            self._noted[-1].until_ms = now_ms
        while self._queue and self._queue[-1][0] <= now_ms:
            at_ms, request = self._queue.pop()
            self.played.arrival_ms[request.id] = at_ms
            self.played.queued_ms[request.id] = now_ms
            self.found.add(now_ms)
            self._engine.submit(request)

    def _tell(self, outputs: Sequence[Any], now_ms: float) -> None:
        played = self.played
        for output in outputs:
            name = output.request_id
            if output.token is not None:
                count = played.tokens[name] = played.tokens.get(name, 0) + 1
                if count == 1:
                    played.first_ms[name] = now_ms
                elif count == 2:
                    played.second_ms[name] = now_ms
                if count > 1:
                    played.gaps_ns[round(now_ms * 1e6) - round(played.last_ms[name] * 1e6)] += 1
                played.last_ms[name] = now_ms
                played.cached[name] = output.cached_tokens
            if output.finish_reason is not None:
                played.ended[name] = (output.finish_reason, output.error)
                if self._progress is not None:
                    self._progress(len(played.ended))
                if self.follow is not None and (later := self.follow(name, now_ms)) is not None:
                    insort(self._queue, later, key=lambda row: -row[0])

"""The engine's twin: the same scheduler with an executor that only knows how long a step takes."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from understudy.errors import InvalidArgument
from understudy.qwen3.executor import Computed, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.qwen3.engine import Engine
    from understudy.qwen3.request import Request
    from understudy.qwen3.scheduler import Plan


class Composition(NamedTuple):
    """A step as a timing model sees it: (tokens, history) of each chunk, and the context of each decode."""

    chunks: tuple[tuple[int, int], ...]
    decodes: tuple[int, ...]

    @classmethod
    def of(cls, step: Step) -> Composition:
        """Of what an executor is given."""
        return cls(
            tuple((len(chunk.tokens), chunk.view.seq_len - len(chunk.tokens)) for chunk in step.chunks),
            tuple(decode.view.seq_len for decode in step.decodes),
        )


class StepTime(Protocol):
    """How long a step takes, in milliseconds."""

    def ms(self, step: Composition) -> float:
        """Never negative."""


class VirtualClock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def wait_until(self, ms: float) -> None:
        """Let it become so late."""
        self.now_ms = max(self.now_ms, ms)


class RecordedTime(VirtualClock):
    """A clock and step times in one: what was measured happens again, to the moment."""

    def __init__(self, steps: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._steps = list(reversed(steps))

    def wait_until(self, ms: float) -> None:
        """Wakes when the recorded engine did."""
        super().wait_until(max(ms, self._steps[-1]["at_ms"] if self._steps else ms))

    def ms(self, _: Composition) -> float:
        """Until the recorded engine took arrivals in again."""
        step = self._steps.pop()
        return max(0.0, step["at_ms"] + step["ms"] - self.now_ms)


class SimulatedExecutor:
    """Takes its time from a model, on a virtual clock. Its tokens are filler."""

    def __init__(self, time: StepTime, clock: VirtualClock) -> None:
        self.time = time
        self.clock = clock
        self._step: Step | None = None

    def begin(self, step: Step) -> None:
        """See `Executor`."""
        self._step = step

    def finish(self) -> Computed:
        """See `Executor`."""
        step, self._step = self._step, None
        assert step is not None, "no step was begun"
        self.clock.now_ms += self.time.ms(Composition.of(step))
        return Computed([0] * len(step), [None] * len(step))

    def close(self) -> None:
        """See `Executor`."""
        self._step = None


class Clock(Protocol):
    """What `play` needs of time."""

    @property
    def now_ms(self) -> float:
        """Milliseconds since the run began."""

    def wait_until(self, ms: float) -> None:
        """Return when it is so late."""


@dataclass(slots=True)
class Played:
    """What a workload left: the steps, and when each request got its first and its last token."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    arrival_ms: dict[str, float] = field(default_factory=dict)
    first_ms: dict[str, float] = field(default_factory=dict)
    last_ms: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    @property
    def decisions(self) -> str:
        """A digest of who computed what in which step."""
        plain = [(step["chunks"], step["decodes"]) for step in self.steps]
        return hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]

    @property
    def mean_ttft_ms(self) -> float:
        """Arrival to first token."""
        return sum(self.first_ms[name] - self.arrival_ms[name] for name in self.first_ms) / len(self.first_ms)

    @property
    def mean_tpot_ms(self) -> float:
        """Time between tokens after the first, each request counted once."""
        several = [name for name, count in self.tokens.items() if count > 1]
        gaps = ((self.last_ms[n] - self.first_ms[n]) / (self.tokens[n] - 1) for n in several)
        return sum(gaps) / len(several)

    def compositions(self) -> list[tuple[Composition, float]]:
        """Its steps as a timing model is fitted on them, with their milliseconds."""
        return [
            (
                Composition(
                    tuple((tokens, history) for _, tokens, history in step["chunks"]),
                    tuple(context for _, context in step["decodes"]),
                ),
                step["ms"],
            )
            for step in self.steps
        ]


def play(engine: Engine, workload: Sequence[tuple[float, Request]], clock: Clock) -> Played:
    """Submit each request at its time (ms, ascending), and step until all have ended.

    A step lasts from the moment at which arrivals were taken in for it to the same moment of the next: whoever is given
    those durations makes the same decisions.
    """
    if any(a[0] > b[0] for a, b in itertools.pairwise(workload)):
        raise InvalidArgument("arrivals must ascend")
    played = Played()
    queue = list(reversed(workload))

    def poll() -> None:
        began[0] = now_ms = clock.now_ms
        if played.steps and played.steps[-1]["ms"] is None:
            played.steps[-1]["ms"] = now_ms - played.steps[-1]["at_ms"]
        while queue and queue[-1][0] <= now_ms:
            at_ms, request = queue.pop()
            played.arrival_ms[request.id] = at_ms
            engine.submit(request)

    def note(plan: Plan) -> None:
        chunks = [
            [request.id, len(chunk.tokens), chunk.view.seq_len - len(chunk.tokens)]
            for request, chunk in zip(plan.chunks, plan.step.chunks, strict=True)
        ]
        decodes = [
            [request.id, decode.view.seq_len]
            for request, decode in zip(plan.decodes, plan.step.decodes, strict=True)
        ]
        played.steps.append({"at_ms": began[0], "ms": None, "chunks": chunks, "decodes": decodes})

    began = [clock.now_ms]
    engine.on_step = note
    try:
        while queue or not engine.idle:
            if engine.idle and queue:
                clock.wait_until(queue[-1][0])
            for output in engine.step(poll):
                now_ms = clock.now_ms
                if output.token is not None:
                    played.first_ms.setdefault(output.request_id, now_ms)
                    played.last_ms[output.request_id] = now_ms
                    played.tokens[output.request_id] = played.tokens.get(output.request_id, 0) + 1
                    played.cached[output.request_id] = output.cached_tokens
    finally:
        engine.on_step = None
    return played

"""The twin makes the engine's decisions, on a clock of its own."""

from __future__ import annotations

import numpy as np
import pytest

from qwen3.building import OPEN, TINY, engine_of, prompt_of
from understudy.errors import InvalidArgument
from understudy.kv import KvCacheManager
from understudy.qwen3.engine import Engine
from understudy.qwen3.request import Request
from understudy.qwen3.scheduler import Scheduler
from understudy.qwen3.steptime import FittedStepTime
from understudy.qwen3.twin import Composition, RecordedTime, SimulatedExecutor, VirtualClock, play


class Measured:
    """Step times that a device might have: they follow what a step does, with an offset."""

    def ms(self, step: Composition) -> float:
        return 2.0 + 0.1 * sum(tokens for tokens, _ in step.chunks) + 0.01 * sum(step.decodes)


class Ticking:
    """A wall clock for a real engine: every look at it costs a little."""

    def __init__(self) -> None:
        self._now = 0.0

    @property
    def now_ms(self) -> float:
        self._now += 0.37
        return self._now

    def wait_until(self, ms: float) -> None:
        self._now = max(self._now, ms)


def workload(count: int = 12) -> list[tuple[float, Request]]:
    stem = prompt_of(99, 9)
    return [
        (
            7.0 * number,
            Request(f"{number}", stem + prompt_of(number, 3 + 5 * number % 17), 2 + 3 * number % 11),
        )
        for number in range(count)
    ]


def twin_of(engine: Engine, time: object, clock: VirtualClock) -> Engine:
    manager = KvCacheManager(engine.scheduler.manager.total_blocks, engine.scheduler.manager.layout)
    twin = Engine(Scheduler(manager, engine.scheduler.config), SimulatedExecutor(time, clock))  # type: ignore[arg-type]
    OPEN.append(twin)
    return twin


def test_with_the_measured_durations_the_twin_decides_as_the_engine_did() -> None:
    engine = engine_of(TINY, budget=24, seqs=4, blocks=40)
    real = play(engine, workload(), Ticking())
    assert all(step["ms"] > 0 for step in real.steps)
    clock = RecordedTime(real.steps)
    twin = play(twin_of(engine, clock, clock), workload(), clock)
    assert twin.decisions == real.decisions
    assert twin.cached == real.cached
    assert sum(real.cached.values()) > 0
    assert twin.tokens == real.tokens


def test_a_fit_finds_the_times_that_made_the_steps() -> None:
    rng = np.random.default_rng(1)
    steps = []
    for number in range(400):
        decodes = tuple(rng.integers(50, 900, rng.integers(1, 80)).tolist())
        chunks = ((int(rng.integers(300, 2000)), int(rng.integers(0, 3) * 512)),) if number % 2 else ()
        step = Composition(chunks, decodes)
        steps.append((step, Measured().ms(step)))
    fitted = FittedStepTime.fit(steps)
    for step, ms in steps:
        assert fitted.ms(step) == pytest.approx(ms, rel=0.02)


def test_a_short_prompt_costs_what_as_many_decodes_cost() -> None:
    fitted = FittedStepTime((1.0, 0.0, 0.0, 0.0, 0.01), (5.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 512.0)
    assert fitted.ms(Composition(((3, 10),), (20,))) == pytest.approx(1.0 + 0.01 * (11 + 12 + 13 + 20))
    assert fitted.ms(Composition(((300, 0),), ())) == fitted.ms(Composition(((512, 0),), ()))


def test_a_fit_without_a_kind_of_step_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="that only decode, got 0"):
        FittedStepTime.fit([(Composition(((5, 0),), ()), 3.0)] * 9)


def test_arrivals_that_go_back_in_time_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="ascend"):
        play(engine_of(), [(2.0, Request("a", [1], 1)), (1.0, Request("b", [1], 1))], VirtualClock())

"""The twin makes the engine's decisions, on a clock of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from qwen3.building import OPEN, TINY, engine_of, executor_of, manager_of, prompt_of
from understudy import _core
from understudy.clock import ScriptedClock
from understudy.errors import InvalidArgument
from understudy.qwen3.engine import Engine
from understudy.qwen3.host import HostTier
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.pages import PinnedPages
from understudy.qwen3.request import Request
from understudy.qwen3.runner import run_workload
from understudy.qwen3.scheduler import Scheduler
from understudy.qwen3.twin import build_recorded_twin, build_twin
from understudy.qwen3.workloads import copy_requests
from understudy.timing.recorded.fit import FittedStepTime, kind_of
from understudy.timing.recorded.load import LinkTimes, StepLoad, load_of, load_of_row
from understudy.timing.recorded.shapes import shape_of

if TYPE_CHECKING:
    from collections.abc import Callable

MS = 1_000_000


class Measured:
    """Step times that a device might have: they follow what a step does, with an offset."""

    def step_ms(self, step: _core.StepLoad) -> float:
        return 2.0 + 0.1 * (step.tokens - step.decodes) + 0.01 * step.context_tokens

    def launch_ms(self, step: _core.StepLoad) -> float:
        return 0.25 + 0.001 * step.tokens


class Ticking(ScriptedClock):
    """A wall clock for a real engine: every look at it costs a little."""

    def now_ns(self) -> int:
        self.time_ns += 370_000
        return self.time_ns


def workload(count: int = 12) -> list[tuple[int, Request]]:
    stem = prompt_of(99, 9)
    return [
        (
            7 * MS * number,
            Request(f"{number}", stem + prompt_of(number, 3 + 5 * number % 17), 2 + 3 * number % 11),
        )
        for number in range(count)
    ]


def test_with_the_measured_durations_the_twin_decides_as_the_engine_did() -> None:
    engine = engine_of(TINY, budget=24, seqs=4, blocks=40)
    real = run_workload(engine, workload(), Ticking())
    assert all(step["ms"] > 0 for step in real.steps)
    twin, clock = build_recorded_twin(real, engine)
    OPEN.append(twin)
    imposed = run_workload(twin, workload(), clock)
    assert imposed.decisions == real.decisions
    assert imposed.cached == real.cached
    assert sum(real.cached.values()) > 0
    assert imposed.tokens == real.tokens
    assert imposed.polls == real.polls


class Lazy(PinnedPages):
    """Copies that are seen to end only when they have been asked for a while."""

    hurry = False

    def wait(self) -> None:
        self.hurry = True

    def begin_copy(self, *given, **how):  # type: ignore[no-untyped-def]
        done = super().begin_copy(*given, **how)
        asked = [0]

        def late() -> bool:
            asked[0] += 1
            return (self.hurry or asked[0] > 3) and done()

        return late


def test_so_it_does_with_host_memory_below() -> None:
    manager = manager_of(TINY, 26)
    executor = executor_of(TINY, manager)
    tier = HostTier(manager, Lazy(200, executor.buffer))
    engine = Engine(Scheduler(manager, SchedulerConfig(24, 4, 512), host=tier), executor)
    OPEN.append(engine)
    rows = [
        (11 * MS * number, Request(f"{number}", prompt_of(number % 5, 40) + prompt_of(90 + number, 3), 3))
        for number in range(20)
    ]
    fresh = copy_requests(rows)
    real = run_workload(engine, rows, Ticking())
    assert tier.onboarded_blocks > 0
    twin, clock = build_recorded_twin(real, engine)
    OPEN.append(twin)
    imposed = run_workload(twin, fresh, clock)
    assert imposed.decisions == real.decisions
    assert imposed.cached == real.cached
    assert imposed.copies == real.copies


def test_simulated_pages_take_the_link_and_the_host_their_time() -> None:
    clock = ScriptedClock()
    engine = build_twin(
        SchedulerConfig(64, 4, 512),
        13,
        TINY.layout(4),
        Measured(),
        clock,
        host=(100, LinkTimes(0.0, 0.5, 1.0, 2.0)),
    )
    OPEN.append(engine)
    asks = [
        (0, Request("a", prompt_of(1, 24), 1)),
        (500 * MS, Request("b", prompt_of(2, 40), 1)),
        (1000 * MS, Request("c", prompt_of(1, 24), 1)),
    ]
    played = run_workload(engine, asks, clock)
    assert played.cached == {"a": 0, "b": 0, "c": 20}
    assert played.first_ms["a"] == pytest.approx(
        2.0 + 2.4 + 6 * 0.5
    )  # six pages are set off before it is told
    # Two of its pages are still there, three come back one after the other, and four tokens are computed.
    assert played.first_ms["c"] == pytest.approx(1000.0 + 3 * 0.5 + 3 * 2.0 + 2.0 + 0.4)


def test_outputs_are_told_when_the_next_step_has_been_launched() -> None:
    clock = ScriptedClock()
    engine = build_twin(SchedulerConfig(64, 4, 512), 40, TINY.layout(4), Measured(), clock)
    OPEN.append(engine)
    played = run_workload(engine, [(0, Request("a", prompt_of(1, 10), 2))], clock)
    assert played.first_ms["a"] == pytest.approx(3.0 + 0.251)
    assert played.last_ms["a"] == pytest.approx(3.0 + 2.11)


def test_a_fit_finds_the_times_that_made_the_steps() -> None:
    rng = np.random.default_rng(1)
    steps = []
    for number in range(400):
        decodes = rng.integers(50, 900, rng.integers(1, 80)).tolist()
        chunks = [(int(rng.integers(300, 1900)), int(rng.integers(0, 3) * 512))] if number % 2 else []
        step = load_of(chunks, decodes)
        shape = shape_of(sum(tokens for tokens, _ in chunks), len(chunks), len(decodes))
        assert shape is not None
        ms = 2.0 + 0.01 * shape.tokens + 0.01 * step.context_tokens
        steps.append((step, ms * (3 if number % 97 == 5 else 1)))  # now and then the machine is elsewhere
    fitted = FittedStepTime.fit(steps)
    errors = [fitted.step_ms(step) / ms - 1 for step, ms in steps]
    assert np.median(np.abs(errors)) < 0.05
    assert sum(fitted.step_ms(step) for step, _ in steps) == pytest.approx(
        sum(ms for _, ms in steps), rel=0.01
    )


def test_what_is_captured_how_has_times_of_its_own() -> None:
    assert kind_of(load_of([], [5] * 9)) == "decode"
    assert kind_of(load_of([(20, 100)], [5] * 9)) == "decode"
    assert kind_of(load_of([(200, 100)], [5] * 9)) == "mixed"
    assert kind_of(load_of([(3000, 0)], [])) == "eager"
    assert kind_of(load_of([], [5] * 300)) == "eager"


def test_a_fit_without_a_kind_of_step_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="that only decode, got 0"):
        FittedStepTime.fit([(load_of([(50, 0)], []), 3.0)] * 9)


def test_arrivals_that_go_back_in_time_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="ascend"):
        run_workload(engine_of(), [(2, Request("a", [1], 1)), (1, Request("b", [1], 1))], ScriptedClock())


@pytest.mark.parametrize(
    "make",
    [
        _core.polynomial_timing,
        lambda: _core.constant_timing(3.0, 2.0),
        lambda: _core.python_timing(Measured()),
    ],
    ids=["polynomial", "constant", "python"],
)
def test_the_twin_takes_its_time_from_any_timing_model_of_a_simulated_engine(
    make: Callable[[], _core.StepTiming],
) -> None:
    """Both see the same step: one type, whoever made it."""
    timing = make()
    clock = ScriptedClock()
    engine = build_twin(SchedulerConfig(24, 4, 512), 40, TINY.layout(4), timing, clock)
    OPEN.append(engine)
    played = run_workload(engine, workload(), clock)
    assert len(played.ended) == 12
    for step in played.steps:
        chunks = [(tokens, history) for _, tokens, history in step["chunks"]]
        contexts = [context for _, context in step["decodes"]]
        seen = _core.StepLoad(
            chunks=chunks,
            decodes=len(contexts),
            context_tokens=sum(contexts),
            longest_context=max(contexts, default=0),
        )
        assert step["ms"] == pytest.approx(timing.step_ms(seen))
        assert timing.step_ms(load_of_row(step)) == timing.step_ms(seen)


def test_a_fit_says_which_steps_are_larger_than_those_it_saw() -> None:
    fitted = FittedStepTime.fit(
        [(load_of([(300, 0)] if number % 2 else [], [100] * 9), 2.0 + number % 2) for number in range(40)]
    )
    for model in (fitted, _core.python_timing(fitted)):
        assert model.covers(load_of([(300, 500)], [100] * 9))
        assert not model.covers(load_of([(301, 0)], []))
        assert not model.covers(load_of([], [10] * 10))
        assert not model.covers(load_of([], [901]))
    assert _core.python_timing(Measured()).covers(load_of([(9999, 0)], []))  # one that does not say


def test_fitted_times_time_a_simulated_engine_too() -> None:
    rng = np.random.default_rng(2)
    steps = []
    for number in range(60):
        decodes = rng.integers(50, 900, rng.integers(1, 40)).tolist()
        step = load_of([(300, 0)] if number % 2 else [], decodes)
        steps.append((step, 2.0 + 0.01 * step.tokens + 1e-4 * step.context_tokens))
    fitted = FittedStepTime.fit(steps)
    ours, theirs = (
        kind(chunks=[(400, 16)], decodes=3, context_tokens=600, longest_context=300)
        for kind in (StepLoad, _core.StepLoad)
    )
    assert fitted.step_ms(ours) == fitted.step_ms(theirs)

"""An engine belongs to one caller at a time: a second one is told, and nothing breaks."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from threads import run_together
from tiers.building import MS, Worker, chain, shared, tiers
from understudy import _core
from understudy.errors import InvalidArgument, WrongState

if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGE = "in the middle of a call"


class SlowTiming:
    """A timing model that waits, in the middle of a call of the engine, until it may go on."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go_on = threading.Event()

    def prefill_ms(self, *_: int) -> float:
        self.asked.set()
        assert self.go_on.wait(60)
        return 1.0

    def decode_ms(self, *_: int) -> float:
        return 1.0


def engine_of(timing: _core.StepTiming, config: _core.TierConfig | None, **more: Any) -> _core.VllmEngine:
    settings = _core.VllmEngineConfig(block_size=4, num_gpu_blocks=32)
    return _core.VllmEngine(settings, timing, tiers=config, **more)


CALLS: dict[str, Callable[[_core.VllmEngine], object]] = {
    "submit": lambda engine: engine.submit("late", 8, 2, chain(7)),
    "cancel": lambda engine: engine.cancel(0, 0),
    "begin_step": lambda engine: engine.begin_step(0),
    "end_step": lambda engine: engine.end_step(0),
    "advance": lambda engine: engine.advance(10 * MS),
    "land": lambda engine: engine.land(10 * MS),
    "prefetch": lambda engine: engine.prefetch(chain(1)[:2], 0),
    "take_events": lambda engine: engine.take_events(),
    "check": lambda engine: engine.check(),
    "what its events tell": lambda engine: _core.EventTruth().require_equal(engine),
    "idle": lambda engine: engine.idle,
}


@pytest.mark.parametrize("call", CALLS)
def test_a_second_thread_is_told_and_the_first_goes_on(call: str) -> None:
    timing = SlowTiming()
    engine = engine_of(_core.python_timing(timing), tiers())
    engine.submit("first", 8, 2, chain(1))
    refused: list[str] = []

    def other() -> None:
        assert timing.asked.wait(60)
        try:
            with pytest.raises(WrongState, match=MESSAGE) as raised:
                CALLS[call](engine)
            refused.append(str(raised.value))
        finally:
            timing.go_on.set()

    run_together(lambda: engine.advance(1000 * MS), other)
    assert len(refused) == 1
    assert engine.idle
    engine.check()


def test_what_a_call_returns_is_the_callers_own_whoever_calls_next() -> None:
    settings = _core.VllmEngineConfig(
        block_size=4, num_gpu_blocks=4096, enable_prefix_caching=False, max_num_seqs=256
    )
    engine = _core.VllmEngine(settings, _core.constant_timing(0.0, 1.0))
    answers: list[int] = []

    def play() -> None:
        for _ in range(3000):
            try:
                for _ in range(40):
                    engine.submit("a", 4, 40)
                effects = engine.advance(engine.now_ns + 20 * MS)
            except (WrongState, InvalidArgument):  # the other is in a call, or was, and has come further
                continue
            answers.append(sum(tokens for _, tokens in effects.tokens) + len(effects.finished))

    run_together(play, play)
    assert sum(answers) > 0


def test_workers_of_one_run_take_turns() -> None:
    config = tiers(g3=shared())
    run = _core.TierRun(config, 4)
    timing = SlowTiming()
    one = engine_of(_core.python_timing(timing), config, run=run)
    two = engine_of(_core.constant_timing(1.0, 1.0), config, run=run)
    one.submit("first", 8, 2, chain(1))

    def other() -> None:
        assert timing.asked.wait(60)
        try:
            for call in (
                lambda: two.advance(MS),
                lambda: run.run_until(MS),
                run.check,
                lambda: engine_of(_core.constant_timing(1.0, 1.0), config, run=run),
            ):
                with pytest.raises(WrongState, match=MESSAGE):
                    call()
        finally:
            timing.go_on.set()

    run_together(lambda: one.advance(1000 * MS), other)
    two.submit("second", 8, 2, chain(2))
    two.advance(2000 * MS)
    assert two.idle


@pytest.mark.parametrize("write_through", [False, True])
def test_what_an_engine_has_under_way_lands_though_it_was_dropped(write_through: bool) -> None:
    config = tiers(g3=shared(), write_through=write_through)
    run = _core.TierRun(config, 4, check=True)
    for turn in range(30):
        engine = engine_of(_core.constant_timing(1.0, 1.0), config, run=run)
        engine.skip_to(4 * turn * MS)
        engine.submit("first", 120, 1, chain(turn + 1, 30))
        engine.submit("second", 120, 1, chain(100 + turn, 30))
        engine.advance((4 * turn + 3) * MS)
        del engine
    assert run.next_wake_ns is not None
    run.run_until(10**6 * MS)
    run.check()
    assert run.next_wake_ns is None


class Meddler:
    """An offload policy that calls its engine back."""

    def __init__(self, meddle: Callable[[_core.VllmEngine], object]) -> None:
        self.meddle = meddle
        self.engine: _core.VllmEngine | None = None
        self.refusals = 0

    def select(self, lineages: list[int], _reuse: object) -> list[bool]:
        assert self.engine is not None
        with pytest.raises(WrongState, match=MESSAGE):
            self.meddle(self.engine)
        self.refusals += 1
        return [True] * len(lineages)


@pytest.mark.parametrize("call", CALLS)
def test_a_policy_that_calls_back_is_refused(call: str) -> None:
    policy = Meddler(CALLS[call])
    worker = Worker(2, tiers(offload_filter=policy))
    policy.engine = worker.engine
    worker.cache(1, 2)
    worker.cache(2, 2)
    assert policy.refusals > 0
    policy.engine = None  # the engine keeps its policy
    worker.check()

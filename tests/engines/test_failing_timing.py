"""A timing model that raises stops a step, not the engine: asked again, everything goes on as if it had not."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engines.building import MS, engine_for
from engines.test_scripted_clock import content
from understudy import _core


class Fragile:
    """Constant times, and an error at one call."""

    def __init__(self, fails_at: int) -> None:
        self.calls = 0
        self.fails_at = fails_at

    def prefill_ms(self, requests: int, mean_input: int, mean_cached: int) -> float:  # noqa: ARG002
        return self._ms(3.0)

    def decode_ms(self, requests: int, context: int, mean: int, capacity: int) -> float:  # noqa: ARG002
        return self._ms(1.0)

    def _ms(self, ms: float) -> float:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("no idea")
        return ms


def play(fails_at: int, asynchronous: bool, fast_forward: bool) -> tuple[list[Any], int, int]:
    """What becomes of requests that arrive at different times, how often the model raised and was asked."""
    model = Fragile(fails_at)
    config = {"block_size": 4, "num_blocks": 14, "async_scheduling": asynchronous}
    engine = engine_for(config, timing=_core.python_timing(model))
    engine.set_fast_forward(fast_forward)
    seen: list[Any] = []
    raised = 0
    for number, until_ms in enumerate([0, 3, 11, 500]):
        while True:
            try:
                effects = engine.advance(until_ms * MS)
            except RuntimeError:
                raised += 1
                engine.check()
                continue
            seen += [
                (r.id, r.first_admit_ns, r.first_token_ns, r.second_token_ns, r.finish_ns, r.output_tokens)
                for r in effects.finished
            ]
            break
        if number < 3:
            if not engine.in_step:
                engine.skip_to(until_ms * MS)
            engine.submit(f"{number}", 8 + number, 14, content(1 + 100 * number, 22 + number))
    engine.check()
    assert engine.idle
    return [*seen, engine.steps, engine.preemptions], raised, model.calls


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("fast_forward", [False, True], ids=["stepping", "fast_forward"])
def test_the_engine_goes_on_wherever_the_model_raised(asynchronous: bool, fast_forward: bool) -> None:
    whole, raised, calls = play(-1, asynchronous, fast_forward)
    assert raised == 0
    assert len(whole) == 3 + 2
    for fails_at in range(1, calls + 1):
        again, raised, _ = play(fails_at, asynchronous, fast_forward)
        assert raised == 1
        assert again == whole, fails_at


def crowded(fails_at: int, asynchronous: bool, seed: int) -> tuple[list[Any], int]:
    """A full pool: who waits could be admitted as soon as another is preempted."""
    model = Fragile(fails_at)
    config = {"block_size": 4, "num_blocks": 20, "async_scheduling": asynchronous}
    engine = engine_for(config, timing=_core.python_timing(model))
    draw = random.Random(seed)
    seen: list[Any] = []
    until_ns = 0
    for number in range(31):
        until_ns += 10**4 * MS if number == 30 else draw.randrange(0, 12) * MS
        while True:
            try:
                effects = engine.advance(until_ns)
                break
            except RuntimeError:
                engine.check()
        seen += [(r.id, r.first_admit_ns, r.first_token_ns, r.finish_ns) for r in effects.finished]
        if number < 30:
            if engine.idle:
                engine.skip_to(until_ns)
            prompt, output = draw.randrange(4, 40), draw.randrange(1, 12)
            engine.submit(f"{number}", prompt, output, content(1 + 100 * draw.randrange(6), prompt + output))
    assert engine.idle
    return [*seen, engine.steps, engine.preemptions], model.calls


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_step_that_preempted_and_failed_admits_nobody_when_it_is_asked_for_again(
    asynchronous: bool,
) -> None:
    preempted = 0
    for seed in range(8):
        whole, calls = crowded(-1, asynchronous, seed)
        preempted += whole[-1]
        for fails_at in range(1, calls + 1):
            assert crowded(fails_at, asynchronous, seed)[0] == whole, (seed, fails_at)
    assert preempted > 8


def test_keys_of_blocks_that_nobody_computes_are_gone() -> None:
    model = Fragile(1)
    engine = engine_for({"block_size": 4, "num_blocks": 14}, timing=_core.python_timing(model))
    gone = engine.submit("a", 8, 2, content(1, 10))
    with pytest.raises(RuntimeError, match="no idea"):
        engine.begin_step(0)
    assert not engine.in_step
    assert engine.resident_hashes() == []
    assert engine.cancel(gone, 0).finished
    assert (engine.idle, engine.free_blocks) == (True, 13)
    engine.submit("b", 8, 2, content(1, 10))
    engine.begin_step(0)
    assert engine.admitted == [(1, False, 0)]
    engine.end_step(MS)


def test_a_model_that_raises_while_the_queue_is_looked_at_names_no_block_that_nobody_computes() -> None:
    # It is asked what loading from the host would save, after those that run have been given their turns.
    noticed = 0
    for fails_at in range(1, 60):
        model = Fragile(fails_at)
        host = _core.TierConfig(
            bytes_per_block=1000, g2_blocks=64, host=_core.LinkPairConfig(down_gbps=1.0, up_gbps=1.0)
        )
        engine = _core.VllmEngine(
            _core.VllmEngineConfig(block_size=4, num_gpu_blocks=9, events=True),
            _core.python_timing(model),
            tiers=host,
        )
        arrivals = {0: (1, 12, 2), 4: (200, 16, 3), 8: (300, 6, 16), 10: (1, 14, 4), 12: (1, 13, 4)}
        now_ns = 0
        for turn in range(60):
            if turn in arrivals:
                first, prompt, output = arrivals[turn]
                engine.submit(f"{turn}", prompt, output, content(first, prompt + output))
            if engine.idle:
                now_ns += 4 * MS
                engine.skip_to(now_ns)
                continue
            before = set(engine.resident_hashes())
            try:
                engine.begin_step(now_ns)
                now_ns = engine.now_ns
            except RuntimeError:
                engine.check()
                noticed += len(engine.running) > 0
                assert set(engine.resident_hashes()) <= before
            if engine.in_step:
                engine.end_step(now_ns)
            elif not engine.idle:
                now_ns += MS
        assert engine.idle
        truth = _core.EventTruth()
        truth.apply(engine.take_all_events())
        truth.require_equal(engine)
    assert noticed > 3


def test_who_was_admitted_on_a_block_of_the_same_schedule_keeps_it() -> None:
    model = Fragile(1)
    engine = engine_for({"block_size": 4, "num_blocks": 14}, timing=_core.python_timing(model))
    engine.submit("a", 9, 3, content(1, 12))
    engine.submit("b", 9, 3, content(1, 12))
    with pytest.raises(RuntimeError, match="no idea"):
        engine.begin_step(0)
    engine.check()
    assert len(engine.advance(100 * MS).finished) == 2
    engine.check()


def two_suspended() -> tuple[_core.VllmEngine, int, int]:
    engine = engine_for({"block_size": 4, "num_blocks": 14}, timing=_core.python_timing(Fragile(1)))
    first = engine.submit("a", 8, 2, content(1, 10))
    second = engine.submit("b", 6, 2, content(100, 8))
    with pytest.raises(RuntimeError, match="no idea"):
        engine.begin_step(0)
    assert (engine.scheduled, engine.admitted) == ([], [])
    return engine, first, second


def test_a_step_that_goes_on_names_whom_it_admitted_before_the_model_raised() -> None:
    engine, first, second = two_suspended()
    engine.begin_step(0)
    assert engine.admitted == [(first, False, 0), (second, False, 0)]
    assert engine.scheduled == [(first, 8), (second, 6)]


def test_whoever_is_cancelled_leaves_the_step_that_the_model_stopped() -> None:
    engine, first, second = two_suspended()
    engine.cancel(first, 0)
    third = engine.submit("c", 5, 2, content(200, 7))
    engine.begin_step(0)
    assert engine.admitted == [(second, False, 0), (third, False, 0)]
    assert engine.scheduled == [(second, 6), (third, 5)]
    engine.check()


def test_a_step_at_another_time_decides_anew() -> None:
    engine, first, second = two_suspended()
    engine.begin_step(MS)
    assert engine.admitted == []  # they run since the step that the model stopped
    assert engine.scheduled == [(first, 8), (second, 6)]
    assert len(engine.advance(100 * MS).finished) == 2

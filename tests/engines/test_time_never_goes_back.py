"""Time never goes backwards: who says otherwise is refused, and nothing has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiers.building import BLOCK, MS, Worker, chain, tiers
from understudy import _core
from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = Callable[[_core.VllmEngine, int], object]

BOTH = pytest.mark.parametrize("below", [False, True], ids=["alone", "with tiers"])
AHEAD = pytest.mark.parametrize("ahead", [False, True], ids=["sync", "async"])


def worker_of(below: bool, ahead: bool = False) -> Worker:
    worker = Worker(64, tiers(write_through=True) if below else None, async_scheduling=ahead, step_ms=5.0)
    worker.submit(1, 3 * BLOCK, 20)
    worker.step(10)
    return worker


def assert_refuses(worker: Worker, call: Call, now_ns: int, before_ns: int) -> None:
    engine = worker.engine

    def seen() -> tuple[object, ...]:
        return (
            engine.now_ns,
            engine.in_step,
            engine.idle,
            engine.steps,
            engine.running,
            engine.pool,
            engine.batch,
        )

    before = seen()
    with pytest.raises(
        InvalidArgument, match=rf"{now_ns} is before {before_ns}\b.*time never goes backwards"
    ):
        call(engine, now_ns)
    assert seen() == before
    worker.check()


def assert_goes_on(worker: Worker) -> None:
    worker.keep(worker.engine.advance(10**12))
    worker.check()
    assert [record.output_tokens for record in worker.records.values()] == [20]


@BOTH
@AHEAD
def test_a_step_does_not_begin_before_the_last_one_has_ended(below: bool, ahead: bool) -> None:
    worker = worker_of(below, ahead)
    end_ns = worker.now_ns
    for now_ns in (end_ns - 1, 0, -1):
        assert_refuses(worker, _core.VllmEngine.begin_step, now_ns, end_ns)
    assert_goes_on(worker)


@BOTH
@AHEAD
def test_a_step_does_not_end_before_it_began(below: bool, ahead: bool) -> None:
    worker = worker_of(below, ahead)
    worker.begin(30)
    for now_ns in (30 * MS - 1, 0, -1):
        assert_refuses(worker, _core.VllmEngine.end_step, now_ns, 30 * MS)
    assert_goes_on(worker)


@BOTH
def test_a_step_may_end_sooner_than_it_was_to(below: bool) -> None:
    worker = worker_of(below)
    worker.begin(30)
    worker.duration_ns = 0
    worker.end()
    assert worker.engine.now_ns == 30 * MS
    assert_goes_on(worker)


@BOTH
@pytest.mark.parametrize("fast_forward", [False, True], ids=["stepping", "fast_forward"])
def test_steps_are_not_played_up_to_a_time_before_the_last_one_began(below: bool, fast_forward: bool) -> None:
    worker = worker_of(below)
    worker.engine.set_fast_forward(fast_forward)
    worker.begin(30)
    assert_refuses(worker, _core.VllmEngine.advance, 30 * MS - 1, 30 * MS)
    worker.engine.advance(30 * MS)  # up to where it stands, nothing happens
    assert worker.engine.in_step
    assert_goes_on(worker)


@BOTH
@AHEAD
@pytest.mark.parametrize("fast_forward", [False, True], ids=["stepping", "fast_forward"])
def test_the_last_step_that_was_played_whole_counts_too(below: bool, ahead: bool, fast_forward: bool) -> None:
    worker = worker_of(below, ahead)
    worker.engine.set_fast_forward(fast_forward)
    for until_ms in (30, 35, 60):
        worker.engine.advance(until_ms * MS)  # where a step ends
        assert not worker.engine.in_step
        assert_refuses(worker, _core.VllmEngine.advance, (until_ms - 5) * MS - 1, (until_ms - 5) * MS)
        worker.engine.advance((until_ms - 5) * MS)
    assert worker.engine.now_ns == 60 * MS
    assert_goes_on(worker)


ANY: dict[str, Call] = {
    "cancel": lambda engine, now_ns: engine.cancel(0, now_ns),
    "forget_cache": lambda engine, now_ns: engine.forget_cache(now_ns),
}
WITH_TIERS: dict[str, Call] = {
    "land": lambda engine, now_ns: engine.land(now_ns),
    "prefetch": lambda engine, now_ns: engine.prefetch(chain(1)[:2], now_ns),
    "set_link_share": lambda engine, now_ns: engine.set_link_share(now_ns, _core.Tier.G2, 0.5),
}
CASES = [(name, False) for name in ANY] + [(name, True) for name in ANY | WITH_TIERS]


@pytest.mark.parametrize("in_step", [False, True], ids=["between steps", "in a step"])
@pytest.mark.parametrize(("name", "below"), CASES)
def test_nothing_else_happens_in_the_past_either(name: str, below: bool, in_step: bool) -> None:
    worker = worker_of(below)
    if in_step:
        worker.begin(30)
    here_ns = 30 * MS if in_step else worker.now_ns
    assert_refuses(worker, (ANY | WITH_TIERS)[name], here_ns - 1, here_ns)
    assert_goes_on(worker)


@pytest.mark.parametrize("fast_forward", [False, True], ids=["stepping", "fast_forward"])
@pytest.mark.parametrize("name", [*ANY, *WITH_TIERS])
def test_steps_go_on_after_what_happened_later_than_the_last_one(name: str, fast_forward: bool) -> None:
    worker = worker_of(True)
    worker.engine.set_fast_forward(fast_forward)
    later = worker.submit(2, BLOCK)
    cancel: dict[str, Call] = {"cancel": lambda engine, now_ns: engine.cancel(later, now_ns)}
    call = (ANY | WITH_TIERS | cancel)[name]
    call(worker.engine, worker.now_ns + 2 * MS)  # by then blocks have landed on the host
    assert worker.engine.now_ns == worker.now_ns + 2 * MS
    worker.engine.cancel(later, worker.engine.now_ns)
    assert_goes_on(worker)


# --- the end of time --------------------------------------------------------------------------------------------------

LATE = r"is after 2\^62 \(146 years\).*count nanoseconds from the beginning of the run"


@pytest.mark.parametrize("name", ["begin_step", *ANY, *WITH_TIERS])
def test_nothing_happens_at_the_end_of_time(name: str) -> None:
    worker = worker_of(True)
    call: Call = ANY.get(name) or WITH_TIERS.get(name) or _core.VllmEngine.begin_step
    for now_ns in (2**63 - 1, 2**62 + 1):
        with pytest.raises(InvalidArgument, match=rf"now_ns {now_ns} {LATE}"):
            call(worker.engine, now_ns)
        worker.check()
    assert_goes_on(worker)


@BOTH
def test_a_step_does_not_end_there_either_unless_that_is_its_end(below: bool) -> None:
    worker = worker_of(below)
    worker.begin(2**62 / MS)
    with pytest.raises(InvalidArgument, match=LATE):
        worker.engine.end_step(2**62 + 5 * MS + 1)
    worker.engine.end_step(2**62 + 5 * MS)
    with pytest.raises(InvalidArgument, match=LATE):
        worker.engine.begin_step(worker.engine.now_ns)


@BOTH
def test_the_engine_has_come_to_where_its_cache_was_forgotten(below: bool) -> None:
    worker = worker_of(below)
    worker.engine.forget_cache(500 * MS)
    assert worker.engine.now_ns == 500 * MS
    with pytest.raises(InvalidArgument, match="is before 500000000, to where the engine has come"):
        worker.engine.begin_step(400 * MS)


@BOTH
@AHEAD
def test_the_engine_has_come_to_where_a_step_could_not_begin(below: bool, ahead: bool) -> None:
    class Raises:
        def prefill_ms(self, *_: int) -> float:
            raise RuntimeError("no idea")

        decode_ms = prefill_ms

    settings = _core.VllmEngineConfig(block_size=4, num_gpu_blocks=32, events=True, async_scheduling=ahead)
    engine = _core.VllmEngine(settings, _core.python_timing(Raises()), tiers=tiers() if below else None)
    engine.submit("a", 8, 2, chain(1))
    with pytest.raises(RuntimeError, match="no idea"):
        engine.begin_step(5 * MS)
    assert (engine.now_ns, engine.in_step) == (5 * MS, False)
    with pytest.raises(InvalidArgument, match="is before 5000000, to where the engine has come"):
        engine.begin_step(2 * MS)


@BOTH
@AHEAD
@pytest.mark.parametrize("fast_forward", [False, True], ids=["stepping", "fast_forward"])
def test_steps_are_played_as_long_as_there_is_time(below: bool, ahead: bool, fast_forward: bool) -> None:
    three_years_ms = 1e11
    worker = Worker(64, tiers() if below else None, step_ms=three_years_ms, async_scheduling=ahead)
    worker.engine.set_fast_forward(fast_forward)
    worker.submit(1, 3 * BLOCK, 60)
    with pytest.raises(InvalidArgument, match=LATE):
        worker.engine.advance(2**63 - 1)
    assert worker.engine.now_ns == 47 * 10**17  # the end of a step that began before 2^62
    assert worker.engine.emitted(0) == 47
    worker.check()

"""The next step is prepared while one runs: same decisions, same answers, and the device reads no half-written step."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3.building import (
    ends,
    watched,
    whole,
)
from qwen3.test_scheduler import engine_with, request
from understudy.kv import KvCacheManager, KvLayout
from understudy.qwen3.engine import Engine
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.scheduler import Scheduler

# --- which steps can be predicted ---------------------------------------------------------------------


def test_a_step_is_predicted_while_all_requests_decode() -> None:
    engine, fake = engine_with(9)
    ahead = watched(engine)
    engine.submit(request("a", 5, 6))
    assert ends(engine.run()) == {"a": "length"}
    assert ahead == [False, False, True, True, True, True]  # the first decode follows a prompt
    assert [step.decodes[0].view.seq_len for step in fake.prepared] == [7, 8, 9, 10]
    whole(engine)


def test_nobody_is_foreseen_beyond_the_end_of_somebody() -> None:
    engine, _ = engine_with(9)
    ahead = watched(engine)
    engine.submit(request("a", 5, 3))
    engine.submit(request("b", 5, 6))
    engine.run()
    assert ahead == [False, False, True, False, True, True]


def test_who_arrives_meanwhile_is_in_the_next_step() -> None:
    engine, fake = engine_with(9)
    ahead = watched(engine)
    engine.submit(request("a", 5, 8))
    for _ in range(3):
        engine.step()
    engine.step(lambda: engine.submit(request("b", 5, 2)))
    engine.step()
    assert fake.steps[-1] == (1, 1)
    assert ahead[-1] is False
    assert ends(engine.run()) == {"a": "length", "b": "length"}
    whole(engine)


def test_who_cannot_be_admitted_keeps_nobody_from_being_prepared() -> None:
    engine, _ = engine_with(9, seqs=1)
    ahead = watched(engine)
    engine.submit(request("a", 5, 6))
    engine.submit(request("b", 5, 6))
    engine.run()
    assert ahead == [False, False, True, True, True, True] * 2


def test_who_is_cancelled_meanwhile_is_not_in_the_next_step() -> None:
    engine, fake = engine_with(9)
    engine.submit(request("a", 5, 8))
    engine.submit(request("b", 5, 8))
    for _ in range(3):
        engine.step()

    def leave() -> None:
        engine.cancel("b")

    outputs = engine.step(leave)
    heard = [(o.request_id, o.token, o.finish_reason) for o in outputs]
    assert heard == [("a", 8, None), ("b", 8, None), ("b", None, "abort")]  # its token was there before
    engine.step()
    assert fake.steps[-1] == (0, 1)
    assert ends(engine.run()) == {"a": "length"}
    whole(engine)


def test_a_stop_token_ends_a_request_that_was_prepared_for_more() -> None:
    engine, fake = engine_with(9)
    engine.submit(request("a", 5, 8, stop_ids=frozenset({8})))
    engine.submit(request("b", 5, 8))
    outputs = engine.run()
    assert ends(outputs) == {"a": "stop", "b": "length"}
    assert [o.token for o in outputs if o.request_id == "a" and o.token is not None] == [5, 6, 7]
    assert [decodes for _, decodes in fake.steps] == [0, 2, 2, 2, 1, 1, 1, 1]
    whole(engine)


def test_who_is_cancelled_when_its_stop_token_is_there_has_stopped() -> None:
    engine, _ = engine_with(9)
    engine.submit(request("a", 5, 8, stop_ids=frozenset({8})))
    for _ in range(3):
        engine.step()
    left: list[bool] = []
    outputs = engine.step(lambda: left.append(engine.cancel("a")))
    assert left == [False]
    assert ends(outputs) == {"a": "stop"}
    whole(engine)


def test_a_name_is_free_again_as_soon_as_its_request_has_stopped() -> None:
    engine, _ = engine_with(9)
    engine.submit(request("a", 5, 8, stop_ids=frozenset({8})))
    for _ in range(3):
        engine.step()
    outputs = engine.step(lambda: engine.submit(request("a", 20, 2)))
    outputs += engine.run()
    assert [o.finish_reason for o in outputs] == ["stop", None, "length"]
    whole(engine)


@pytest.mark.parametrize("at_begin", [True, False])
def test_a_foreseen_step_that_fails_ends_its_culprit_alone(at_begin: bool) -> None:
    engine, fake = engine_with(9)
    fake.at_begin = at_begin
    fake.poison = {23}  # the fourth token of b, fed to a step that was predicted
    engine.submit(request("a", 5, 12))
    engine.submit(request("b", 20, 12))
    outputs = engine.run()
    assert ends(outputs) == {"a": "length", "b": "error"}
    assert [o.token for o in outputs if o.request_id == "b"] == [20, 21, 22, 23, None]
    assert [o.token for o in outputs if o.request_id == "a"] == list(range(5, 17))
    whole(engine)


def test_who_fails_to_prepare_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fake = engine_with(9)
    ahead = watched(engine)

    def refuse(_step: object) -> None:
        raise RuntimeError("too large")

    monkeypatch.setattr(fake, "prepare", refuse)
    engine.submit(request("a", 5, 6))
    assert ends(engine.run()) == {"a": "length"}
    assert not any(ahead)
    whole(engine)


def test_a_driver_that_raises_between_two_steps_loses_no_token() -> None:
    engine, _ = engine_with(9)
    engine.submit(request("a", 5, 8))
    outputs = [output for _ in range(3) for output in engine.step()]

    def broken() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        engine.step(broken)
    outputs += engine.run()
    assert [output.token for output in outputs] == list(range(5, 13))
    whole(engine)


def test_pages_that_may_move_are_not_foreseen() -> None:
    with KvCacheManager(9, KvLayout(16, 1, 1, 1), duplicates="reject") as manager:
        engine = Engine(Scheduler(manager, SchedulerConfig(64, 4, 512)), engine_with(9)[1])
        ahead = watched(engine)
        engine.submit(request("a", 5, 6))
        engine.run()
        assert not any(ahead)


@dataclass(frozen=True)
class Life:
    """A request: its lengths, when it comes, when it is told to leave, and the length at which it stops."""

    prompt: int
    output: int
    comes: int
    leaves: int | None
    stops: int


LIVES = st.builds(
    Life,
    prompt=st.integers(1, 40),
    output=st.integers(1, 30),
    comes=st.integers(0, 9),
    leaves=st.none() | st.integers(0, 25),
    stops=st.integers(1, 120),
)


@settings(max_examples=20, deadline=None)
@given(lives=st.lists(LIVES, min_size=1, max_size=8), seqs=st.integers(1, 5))
def test_foreseen_or_not_decisions_and_answers_are_the_same(lives: list[Life], seqs: int) -> None:
    assert told_of(lives, seqs, foresees=True) == told_of(lives, seqs, foresees=False)


def told_of(lives: list[Life], seqs: int, *, foresees: bool) -> tuple[object, ...]:
    """Who was in which step, and what each request heard."""
    engine, fake = engine_with(12, seqs=seqs, budget=24)
    if not foresees:
        engine._prepare = lambda _plan: None  # type: ignore[assignment, method-assign]
    plans: list[tuple[list[str], list[str]]] = []
    engine.on_step = lambda plan: plans.append(([r.id for r in plan.chunks], [r.id for r in plan.decodes]))
    coming = sorted((life.comes, number) for number, life in enumerate(lives))
    leaving = sorted((life.leaves, number) for number, life in enumerate(lives) if life.leaves is not None)
    left = []

    def poll() -> None:
        while coming and coming[0][0] <= engine.steps:
            number = coming.pop(0)[1]
            life = lives[number]
            stops = frozenset({life.stops})
            engine.submit(request(f"{number}", life.prompt, life.output, stop_ids=stops))
        while leaving and leaving[0][0] <= engine.steps:
            number = leaving.pop(0)[1]
            left.append((number, engine.cancel(f"{number}")))

    heard: dict[str, list[object]] = {}
    while coming or not engine.idle:
        if engine.idle:
            engine.steps += 1
        for output in engine.step(poll):
            heard.setdefault(output.request_id, []).append((output.token, output.finish_reason))
    whole(engine)
    return plans, fake.steps, left, heard

"""The next step is prepared while one runs: same decisions, same answers, and the device reads no half-written step."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3.building import (
    CPU,
    OPEN,
    TINY,
    ends,
    engine_of,
    executor_of,
    generate,
    manager_of,
    prompt_of,
    whole,
)
from qwen3.test_scheduler import engine_with, request
from understudy.kv import KvCacheManager, KvLayout
from understudy.qwen3 import graphs
from understudy.qwen3.arrays import StepArrays
from understudy.qwen3.engine import Engine
from understudy.qwen3.executor import Computed, TorchExecutor
from understudy.qwen3.forward import no_reduce
from understudy.qwen3.graphs import StepGraphs
from understudy.qwen3.limits import SchedulerConfig
from understudy.qwen3.request import Request
from understudy.qwen3.sampling import SamplingParams
from understudy.qwen3.scheduler import Scheduler
from understudy.qwen3.weights import random_weights
from understudy.timing.recorded import shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.timing.recorded.shapes import Shape

WEIGHTS = random_weights(TINY, 7, CPU)


def watched(engine: Engine) -> list[bool]:
    """Of every step, whether it was prepared while the one before it ran."""
    seen: list[bool] = []
    engine.on_step = lambda plan: seen.append(plan.step.ahead)
    return seen


# --- which steps can be predicted ---------------------------------------------------------------------


def test_a_step_is_foreseen_while_everybody_decodes() -> None:
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


# --- what the device is given ------------------------------------------------------------------------


@dataclass
class Stream:
    """A device that does nothing before somebody waits for it, and then everything in order."""

    queued: list[Callable[[], object]] = field(default_factory=list)

    @torch.inference_mode()
    def wait(self) -> None:
        while self.queued:
            self.queued.pop(0)()


class LateArrays(StepArrays):
    """What the host has written is read when its turn comes, not when it was sent."""

    stream: Stream

    def _send(self, host: torch.Tensor, until: int) -> None:
        self.stream.queued.append(lambda: StepArrays._send(self, host, until))

    def set_decode_tokens(self, tokens: torch.Tensor) -> None:
        self.stream.queued.append(lambda: StepArrays.set_decode_tokens(self, tokens))


class LateGraphs(StepGraphs):
    """As captured graphs are: replayed on the stream, with what the arrays hold by then."""

    prepared = 0

    def _capture(self, compute: Callable[[], None]) -> Any:
        LateArrays.stream.wait()
        return SimpleNamespace(replay=lambda: LateArrays.stream.queued.append(compute))

    def replay(self, shape: Any, chunks: Any, decodes: Any, wanted: Any = None) -> Any:
        if wanted is None:
            return super().replay(shape, chunks, decodes)
        self._arrays.fill(shape, chunks, decodes, wanted)
        self._graphs[shape].replay()
        LateArrays.stream.wait()  # torch picks rows at once here, and on a stream in its turn
        return self._logits[wanted], self._greedy[wanted]

    def prepare(self, *given: Any) -> None:
        self.prepared += 1
        super().prepare(*given)


class LateExecutor(TorchExecutor):
    def finish(self) -> Computed:
        LateArrays.stream.wait()
        return super().finish()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> tuple[Engine, LateGraphs]:
    """An engine on such a device, with everything of a captured one but CUDA."""
    monkeypatch.setattr(graphs, "StepArrays", LateArrays)
    monkeypatch.setattr(shapes, "UNEVEN_ROWS", 4)
    monkeypatch.setattr(shapes, "PARTS_COST_TOKENS", 12)
    LateArrays.stream = Stream()
    manager = manager_of(TINY, 90)
    plain = executor_of(TINY, manager, WEIGHTS)
    plain.buffer.pages[manager.padding_block] = 0
    with torch.inference_mode():
        late = LateGraphs(
            plain.weights,
            plain.buffer,
            plain.backend,
            no_reduce,
            padding_block=manager.padding_block,
            max_decodes=4,
            max_tokens=64,
            max_pages=32,
        )
    executor = LateExecutor(plain.weights, plain.buffer, plain.backend, graphs=late)
    engine = Engine(Scheduler(manager, SchedulerConfig(64, 4, 512)), executor)
    OPEN.append(engine)
    return engine, late


def test_captured_steps_that_were_prepared_answer_as_eager_ones_do(
    captured: tuple[Engine, LateGraphs],
) -> None:
    engine, late = captured
    prompts = [prompt_of(seed, 33 + 4 * seed) for seed in range(5)]
    expected = [generate(engine_of(weights=WEIGHTS), prompt, max_tokens=20)[0] for prompt in prompts]
    assert generate(engine, *prompts, max_tokens=20) == expected
    assert late.prepared > 10
    whole(engine)


def test_a_long_context_among_many_answers_as_it_does_alone(
    captured: tuple[Engine, LateGraphs],
) -> None:
    """The same step padded to the shape for uneven contexts, and back when the long one has ended."""
    engine, late = captured
    replayed: list[Shape] = []
    replay = late.replay_prepared

    def noted(shape: Shape, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        replayed.append(shape)
        return replay(shape, count)

    late.replay_prepared = noted  # type: ignore[method-assign]
    prompts = [prompt_of(60, 120), *(prompt_of(seed, 5) for seed in range(61, 64))]
    lives = [10, 30, 30, 30]
    expected = [
        generate(engine_of(weights=WEIGHTS, blocks=90), prompt, max_tokens=life)[0]
        for prompt, life in zip(prompts, lives, strict=True)
    ]
    heard: dict[str, list[int]] = {f"{number}": [] for number in range(4)}
    for number, (prompt, life) in enumerate(zip(prompts, lives, strict=True)):
        engine.submit(Request(f"{number}", prompt, life))
    for output in engine.run():
        assert output.error is None, output
        heard[output.request_id] += [] if output.token is None else [output.token]
    assert list(heard.values()) == expected
    decoded = [shape.uneven for shape in replayed if shape.chunk_rows == 0]
    assert decoded[0] is True
    assert decoded[-1] is False


def test_a_prepared_step_that_does_not_come_leaves_nothing_behind(
    captured: tuple[Engine, LateGraphs],
) -> None:
    engine, late = captured
    prompts = [prompt_of(40 + seed, 34 + seed) for seed in range(4)]
    expected = [generate(engine_of(weights=WEIGHTS), prompt, max_tokens=12)[0] for prompt in prompts]
    heard: dict[str, list[int]] = {f"{number}": [] for number in range(4)}
    arriving = [Request(f"{number}", prompt, 12) for number, prompt in enumerate(prompts)]
    for number in range(4):
        before = late.prepared

        def arrive(number: int = number) -> None:
            if len(arriving) == 4 - number:
                engine.submit(arriving.pop(0))

        for output in engine.step(arrive):  # a step had been prepared without it
            heard[output.request_id] += [] if output.token is None else [output.token]
        assert late.prepared > before or number == 0
        for _ in range(3):
            for output in engine.step():
                heard[output.request_id] += [] if output.token is None else [output.token]
    for output in engine.run():
        heard[output.request_id] += [] if output.token is None else [output.token]
    assert list(heard.values()) == expected
    whole(engine)


def test_what_is_drawn_ahead_is_what_would_be_drawn() -> None:
    prompt = prompt_of(3, 20)
    how = SamplingParams(temperature=0.8, top_k=50, seed=11)
    answers = []
    for foresees in (True, False):
        engine = engine_of(weights=WEIGHTS)
        if not foresees:
            engine._prepare = lambda _plan: None  # type: ignore[assignment, method-assign]
        ahead = watched(engine)
        answers.append(generate(engine, prompt, max_tokens=12, sampling=how))
        assert any(ahead) is foresees
    assert answers[0] == answers[1]

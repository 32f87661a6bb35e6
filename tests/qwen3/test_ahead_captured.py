"""Prepared steps on a device that runs late: captured graphs read what the eager steps read."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from qwen3.building import (
    OPEN,
    TINY,
    WEIGHTS,
    engine_of,
    executor_of,
    generate,
    manager_of,
    prompt_of,
    watched,
    whole,
)
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
from understudy.timing.recorded import shapes

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.timing.recorded.shapes import Shape


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

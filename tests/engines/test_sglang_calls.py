"""Calls of a simulated SGLang engine that a driver may make wrongly, or at a bad time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from understudy import _core
from understudy.engines.sglang_config import SglangConfig
from understudy.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from understudy._core import StepLoad

MS = 1_000_000


class Failing:
    """One millisecond a step, except where it raises."""

    def __init__(self) -> None:
        self.raises = False

    def step_ms(self, step: StepLoad, /) -> float:
        if self.raises:
            raise ArithmeticError(f"no time for {step.tokens} tokens")
        return 1.0


def engine(model: Failing | None = None, *, page: int = 4, **settings: object) -> _core.Engine:
    config = SglangConfig.from_dict(
        {"block_size": page, "num_gpu_blocks": 400, "chunked_prefill_size": -1, **settings}
    )
    return config.core_config(None, 0, events=True).make_engine(_core.python_timing(model or Failing()))


def spec(number: int, prompt: int = 10, outputs: int = 4, hashes: range | None = None) -> _core.RequestSpec:
    pages = hashes or range(1000 * (number + 1), 1000 * (number + 1) + 10)
    return _core.RequestSpec(number, f"r{number}", prompt, outputs, _core.Identities.from_local_hashes(pages))


def due(effects: _core.Effects) -> int:
    assert effects.wake_ns is not None
    return effects.wake_ns


def run_to_end(one: _core.Engine, now_ns: int = 0) -> tuple[int, list[int]]:
    finished: list[int] = []
    effects = one.begin_step(now_ns)
    while True:
        finished += [record.id for record in effects.finished]
        if effects.phase == _core.Phase.IN_STEP:
            now_ns = due(effects)
            effects = one.end_step(now_ns)
        elif effects.phase == _core.Phase.READY:
            effects = one.begin_step(now_ns)
        else:
            return now_ns, finished


@pytest.mark.parametrize("overlap", [True, False])
def test_a_repeated_id_is_refused_and_nothing_changes(overlap: bool) -> None:
    one = engine(disable_overlap_schedule=not overlap)
    one.submit(spec(7), 0)
    with pytest.raises(InvalidArgument, match="request 7 is here already"):
        one.submit(spec(7), 0)
    assert run_to_end(one)[1] == [7]


def test_an_empty_prompt_and_too_few_names_are_refused() -> None:
    one = engine()
    with pytest.raises(InvalidArgument, match="prompt_tokens must be at least 1"):
        one.submit(spec(1, prompt=0), 0)
    with pytest.raises(InvalidArgument, match="identities name 1 pages; the request has 25"):
        one.submit(spec(1, prompt=90, outputs=10, hashes=range(5, 6)), 0)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_a_timing_model_stopped_can_be_begun_again(overlap: bool) -> None:
    model = Failing()
    one = engine(model, disable_overlap_schedule=not overlap)
    one.submit(spec(1), 0)
    model.raises = True
    with pytest.raises(ArithmeticError, match="no time for"):
        one.begin_step(0)
    model.raises = False
    assert run_to_end(one) == (4 * MS, [1])


def test_a_page_with_the_end_of_a_prompt_and_the_first_outputs_is_found_again() -> None:
    one = engine()
    one.submit(spec(1, prompt=10, outputs=7, hashes=range(50, 60)), 0)
    now_ns, _ = run_to_end(one)
    one.submit(spec(2, prompt=30, outputs=2, hashes=range(50, 60)), now_ns + 1)
    effects = one.begin_step(now_ns + 1)
    while not effects.finished:
        effects = (
            one.end_step(due(effects))
            if effects.phase == _core.Phase.IN_STEP
            else one.begin_step(due(effects))
        )
    assert effects.finished[0].cached_first == 16


@pytest.mark.parametrize("overlap", [True, False])
def test_a_cancelled_request_is_reported_at_once_and_once(overlap: bool) -> None:
    one = engine(disable_overlap_schedule=not overlap)
    one.submit(spec(1, outputs=20), 0)
    effects = one.begin_step(0)
    effects = one.end_step(due(effects))
    assert [record.id for record in one.cancel(1, due(effects)).finished] == [1]
    assert run_to_end(one, MS)[1] == []


def test_settings_without_effect_or_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens is vLLM's name"):
        SglangConfig.from_dict({"max_num_batched_tokens": 100})
    with pytest.raises(ConfigError, match="schedule_conservativeness must be a finite number above 0"):
        SglangConfig.from_dict({"schedule_conservativeness": -1.0})
    with pytest.raises(ConfigError, match="max_prefill_tokens"):
        SglangConfig.from_dict({"max_prefill_tokens": 0})

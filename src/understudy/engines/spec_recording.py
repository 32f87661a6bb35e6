"""Recordings of speculative decoding, whose scenarios give the number of accepted drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy._core import VllmEngine, constant_timing
from understudy.engines.profiles import Method  # noqa: TC001  (msgspec reads the annotation)
from understudy.engines.recorder import STEP_NS, Aborts
from understudy.engines.scenario import ScenarioAbort, ScenarioConfig, ScenarioRequest, submit
from understudy.engines.speculation import SpeculativeConfig
from understudy.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from understudy.engines.profiles import VersionProfile


class SpecRequest(ScenarioRequest, frozen=True, forbid_unknown_fields=True):
    """A request. In the step whose first new output has number p (from 0), `accept[p mod len]` drafts are accepted."""

    accept: list[int] = msgspec.field(default_factory=list)


class SpecScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scenario with `k` drafts per step."""

    name: str
    method: Method
    k: int
    config: ScenarioConfig
    max_steps: int
    requests: list[SpecRequest]
    aborts: list[ScenarioAbort] = []
    lookahead_tokens: int | None = None
    """Tokens that vLLM reserved; they follow from the method."""


def read_spec_scenario(scenario: object, path: Path) -> SpecScenario:
    """Validate a file's content; InvalidArgument names the file and the wrong field."""
    try:
        read = msgspec.convert(scenario, SpecScenario)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{path}: scenario: {error}") from error
    for request in read.requests:
        if not request.accept or min(request.accept) < 0:
            raise InvalidArgument(f"{path}: request {request.id}: accept must be numbers of at least 0")
    return read


def run_spec_scenario(
    scenario: SpecScenario, profile: VersionProfile, *, check: bool = False
) -> Iterator[dict[str, Any]]:
    """Run the scenario and yield its recording's lines, one per step."""
    speculation = SpeculativeConfig(method=scenario.method, num_speculative_tokens=scenario.k)
    config = scenario.config
    engine = VllmEngine(
        config.engine_config(profile, check=check, speculative_config=speculation), constant_timing(1.0, 1.0)
    )
    to_come = list(enumerate(scenario.requests))
    numbers: dict[str, int] = {}
    aborts = Aborts(engine, numbers, scenario.aborts)
    finished = 0
    for step in range(scenario.max_steps):
        for index, request in to_come:
            if request.arrival_step > step:
                continue
            numbers[request.id], _ = submit(engine, config, index, request, request.accept)
        to_come = [(index, request) for index, request in to_come if request.arrival_step > step]
        finished += len(aborts.play(step, "before"))
        engine.begin_recorded_step(step * STEP_NS)
        finished += len(aborts.play(step, "mid"))
        effects = engine.end_recorded_step((step + 1) * STEP_NS)
        if check:
            engine.check()
        finished += len(effects.finished)
        name = engine.name
        yield {
            "step": step,
            "scheduled": {name(r): tokens for r, tokens in engine.scheduled},
            "drafts": {name(r): drafts for r, drafts in engine.drafts},
            "cached": {name(r): cached for r, resumed, cached in engine.admitted if not resumed},
            "emitted": {name(r): tokens for r, tokens in effects.tokens},
            "running": [name(r) for r in engine.running],
            "waiting": engine.num_waiting,
            "free_after_schedule": engine.free_after_schedule,
            "free_blocks": engine.free_blocks,
        }
        if finished == len(scenario.requests):
            return

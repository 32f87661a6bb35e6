"""Recordings of speculative decoding, whose scenarios give the number of accepted drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy._core import VllmEngine, constant_timing
from understudy.conformance.recorder import STEP_NS, Aborts
from understudy.conformance.submit import submit
from understudy.engines.profiles import Method  # noqa: TC001  (msgspec reads the annotation)
from understudy.engines.speculation import SpeculativeConfig
from understudy.errors import InvalidArgument
from understudy.run.step_line import RecordedEvents
from understudy.workload.scenario import ScenarioAbort, ScenarioConfig, ScenarioRequest, convert_scenario

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
    read = convert_scenario(SpecScenario, scenario, path)
    for request in read.requests:
        if not request.accept or min(request.accept) < 0:
            raise InvalidArgument(f"{path}: request {request.id}: accept must be numbers of at least 0")
    return read


def run_spec_scenario(
    scenario: SpecScenario, profile: VersionProfile, *, check: bool = False, events: bool = False
) -> Iterator[dict[str, Any]]:
    """Run the scenario and yield its recording's lines, one per step; with `events`, the step's KV events too."""
    speculation = SpeculativeConfig(method=scenario.method, num_speculative_tokens=scenario.k)
    config = scenario.config
    settings = config.engine_config(profile, check=check, speculative_config=speculation)
    engine = VllmEngine(settings, constant_timing(1.0, 1.0))
    to_come = list(enumerate(scenario.requests))
    numbers: dict[str, int] = {}
    aborts = Aborts(engine, numbers, scenario.aborts)
    finished = 0
    recorded = RecordedEvents(config.block_size)
    for step in range(scenario.max_steps):
        for index, request in to_come:
            if request.arrival_step > step:
                continue
            numbers[request.id], firsts = submit(
                engine, config, index, request, request.accept, settings.hashed_ahead
            )
            recorded.first_tokens.update(firsts)
            tokens = request.tokens(index, config.max_model_len).tolist()
            for block, value in enumerate(firsts if settings.hashed_ahead else ()):
                end = (block + 1) * config.block_size
                recorded.tokens_ahead[value] = tokens[end : end + settings.hashed_ahead]
        to_come = [(index, request) for index, request in to_come if request.arrival_step > step]
        finished += len(aborts.play(step, "before"))
        engine.begin_recorded_step(step * STEP_NS)
        finished += len(aborts.play(step, "mid"))
        effects = engine.end_recorded_step((step + 1) * STEP_NS)
        if check:
            engine.check()
        finished += len(effects.finished)
        name = engine.name
        line = {
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
        # Asynchronously the first schedule is followed by no update, so its events wait for the next.
        if events and not (config.async_scheduling and step == 0):
            line["kv_events"] = recorded.describe(engine.peek_events())
            engine.take_events()
        elif events:
            line["kv_events"] = []
        yield line
        if finished == len(scenario.requests):
            return

"""Run a scenario step by step and write the engine's steps in a recording's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy._core import VllmEngine, constant_timing
from understudy.conformance.submit import submit
from understudy.run.step_line import StepRecorder, end_line
from understudy.workload.scenario import DEFAULT_PROFILE, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from understudy.engines.profiles import VersionProfile
    from understudy.workload.scenario import ScenarioAbort

STEP_NS = 1_000_000


def run_scenario(
    scenario: Scenario, profile: VersionProfile = DEFAULT_PROFILE, *, check: bool = False
) -> Iterator[dict[str, Any]]:
    """Run the scenario and yield its recording's lines after the header: one per step, then the totals.

    With `check`, the engine verifies its invariants after every step.
    """
    config = scenario.config
    engine = VllmEngine(config.engine_config(profile), constant_timing(1.0, 1.0))
    recorder = StepRecorder(config.block_size, config.async_scheduling)
    to_come = list(enumerate(scenario.requests))
    numbers: dict[str, int] = {}
    aborts = Aborts(engine, numbers, scenario.aborts or [])
    while recorder.totals["finished"] < len(scenario.requests) and recorder.steps < scenario.max_steps:
        step = recorder.steps
        for index, request in to_come:
            if request.arrival_step > step:
                continue
            numbers[request.id], firsts = submit(engine, config, index, request)
            recorder.first_tokens.update(firsts)
        to_come = [(index, request) for index, request in to_come if request.arrival_step > step]

        aborted = aborts.play(step, "before")
        engine.begin_recorded_step(step * STEP_NS)
        aborted += aborts.play(step, "mid")
        engine.end_recorded_step((step + 1) * STEP_NS)
        if check:
            engine.check()
        line = recorder.ended(engine)
        if scenario.aborts is not None:
            line["aborted"] = aborted
            recorder.totals["finished"] += len(aborted)
        yield line
    done = recorder.totals["finished"] == len(scenario.requests)
    yield end_line("done" if done else "max_steps", [recorder])


class Aborts:
    """Apply a scenario's aborts at their steps."""

    def __init__(self, engine: VllmEngine, numbers: dict[str, int], aborts: Sequence[ScenarioAbort]) -> None:
        self._engine = engine
        self._numbers = numbers
        self._due: dict[tuple[int, str], list[str]] = {}
        for abort in aborts:
            self._due.setdefault((abort.step, abort.when), []).append(abort.id)

    def play(self, step: int, when: str) -> list[str]:
        """Abort the requests that are due and return those that were still in the engine."""
        due = self._due.get((step, when), [])
        return [name for name in due if name in self._numbers and self._abort(self._numbers[name], step)]

    def _abort(self, request: int, step: int) -> bool:
        # The scheduler may still have a request whose last token is already emitted.
        before = len(self._engine.running) + self._engine.num_waiting
        self._engine.cancel(request, step * STEP_NS)
        return len(self._engine.running) + self._engine.num_waiting < before

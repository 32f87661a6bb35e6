"""Compare the engine with recordings of vLLM's engine loop on a clock: the time of each batch and token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from understudy._core import VllmEngine, constant_timing
from understudy.conformance.outcome import Difference, Outcome
from understudy.conformance.submit import submit
from understudy.engines.profiles import PROFILES, find_recorded_profile
from understudy.errors import UnderstudyError
from understudy.workload.scenario import ScenarioConfig, ScenarioRequest, read_file_as

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.engines.profiles import VersionProfile

RECORDED = PROFILES["recorded"]

Batch = tuple[int, int, dict[str, int]]
"""Start, end, and the tokens of each request."""


class TimedRequest(ScenarioRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request that arrives at a time instead of a step."""

    t: int
    arrival_step: int = 0


class TimedAbort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request that is aborted at a time."""

    id: str
    t: int


class ClockScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A timed workload: a batch takes `step_ns` plus `per_token_ns` per token; the host takes no time."""

    step_ns: int
    per_token_ns: int
    config: ScenarioConfig
    requests: list[TimedRequest]
    aborts: list[TimedAbort] = []


class ClockRecord(msgspec.Struct, forbid_unknown_fields=True):
    """Times of each request's first and last token, its number of tokens, and every batch that is not empty."""

    first: dict[str, int] = {}
    last: dict[str, int] = {}
    n: dict[str, int] = {}
    steps: int = 0
    trace: list[Batch] = []


class ClockRecording(msgspec.Struct, frozen=True):
    """Content of a file: the scenario and its recorded outcome."""

    scenario: ClockScenario
    recorded: ClockRecord
    vllm: str = "vllm-src"
    """The recorded version."""


def compare_clock(path: Path, profile: VersionProfile | None = None, *, check: bool = False) -> Outcome:
    """Run a scenario against its recording; InvalidArgument when the file is malformed."""
    recording = read_file_as(ClockRecording, path)
    profile = profile or find_recorded_profile(recording.vllm)
    name = path.name.removesuffix(".json.gz")
    try:
        difference = describe_difference(
            run_clock_scenario(recording.scenario, profile, check=check), recording.recorded
        )
    except UnderstudyError as error:
        difference = Difference("", reason=f"{type(error).__name__}: {error}")
    return Outcome(name, recording.recorded.steps, difference, recording.vllm, profile.name)


def run_clock_scenario(
    scenario: ClockScenario, profile: VersionProfile = RECORDED, *, check: bool = False
) -> ClockRecord:
    """Run an engine as vLLM's loop does: read requests and aborts before each schedule and at each batch end."""
    return _Loop(scenario, profile, check=check).run()


class _Loop:
    def __init__(self, scenario: ClockScenario, profile: VersionProfile, *, check: bool) -> None:
        self._scenario = scenario
        self._engine = VllmEngine(
            scenario.config.engine_config(profile, check=check), constant_timing(0.0, 1.0)
        )
        order = sorted(range(len(scenario.requests)), key=lambda index: scenario.requests[index].t)
        self._to_come = [(scenario.requests[index].t, index) for index in reversed(order)]
        self._aborts = sorted(scenario.aborts, key=lambda abort: -abort.t)
        self._ids: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._record = ClockRecord()

    def run(self) -> ClockRecord:
        now_ns = 0
        while True:
            self._submit_until(now_ns)
            if self._engine.idle or self._engine.stuck:
                if not self._to_come and not (self._engine.stuck and self._aborts):
                    return self._record
                now_ns = min(event.t for event in self._next_events())
                continue
            now_ns = self._step(now_ns)

    def _next_events(self) -> list[TimedRequest | TimedAbort]:
        events: list[TimedRequest | TimedAbort] = list(self._aborts[-1:])
        return events + [self._scenario.requests[index] for _, index in self._to_come[-1:]]

    def _step(self, now_ns: int) -> int:
        engine, record, scenario = self._engine, self._record, self._scenario
        engine.begin_step(now_ns)
        batch = {self._names[request]: tokens for request, tokens in engine.batch}
        end_ns = now_ns
        if batch:
            end_ns += scenario.step_ns + scenario.per_token_ns * sum(batch.values())
            record.trace.append((now_ns, end_ns, batch))
            record.steps += 1
        self._submit_until(end_ns)
        for request, tokens in engine.end_step(end_ns).tokens:
            name = self._names[request]
            record.first.setdefault(name, end_ns)
            record.last[name] = end_ns
            record.n[name] = record.n.get(name, 0) + tokens
        return end_ns

    def _submit_until(self, now_ns: int) -> None:
        while self._to_come and self._to_come[-1][0] <= now_ns:
            _, index = self._to_come.pop()
            request, config = self._scenario.requests[index], self._scenario.config
            number, _ = submit(self._engine, config, index, request)
            self._ids[request.id], self._names[number] = number, request.id
        while self._aborts and self._aborts[-1].t <= now_ns:
            abort = self._aborts.pop()
            if abort.id in self._ids:
                self._engine.cancel(self._ids[abort.id], now_ns)


def describe_difference(ours: ClockRecord, theirs: ClockRecord) -> Difference | None:
    """Return the first difference in time; None when there is none."""
    recorded = [batch for batch in theirs.trace if batch[2]]
    for number, (mine, its) in enumerate(zip(ours.trace, recorded, strict=False)):
        if mine != its:
            return Difference(f"batch {number}", (("batch", mine, its),))
    if len(ours.trace) != len(recorded):
        return Difference("at the end", (("batches", len(ours.trace), len(recorded)),))
    for field in ("first", "last", "n"):
        mine_by_name, its_by_name = getattr(ours, field), getattr(theirs, field)
        for name in {**its_by_name, **mine_by_name}:
            if mine_by_name.get(name) != its_by_name.get(name):
                return Difference(name, ((field, mine_by_name.get(name), its_by_name.get(name)),))
    return None

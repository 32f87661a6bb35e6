"""Recordings of vLLM's native host offload: scheduler and connector run step by step, without a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from understudy._core import VllmEngine, constant_timing
from understudy.conformance.recorder import STEP_NS, Aborts
from understudy.conformance.submit import submit
from understudy.run.step_line import StepRecorder
from understudy.workload.scenario import ScenarioAbort, ScenarioConfig, ScenarioRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy._core import VllmOffload
    from understudy.engines.offload_profiles import OffloadProfile
    from understudy.engines.profiles import VersionProfile

NEVER = 1 << 62

Line = dict[str, Any]


class LockstepOffload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the host, and the duration of a transfer in steps."""

    host_chunks: int
    blocks_per_chunk: int = 1
    eviction_policy: Literal["lru", "arc"] = "lru"
    offload_prompt_only: bool = True
    store_steps: int = 0
    load_steps: int = 0

    def native(self, rules: OffloadProfile) -> VllmOffload:
        """Build the core's configuration under a release's rules."""
        return rules.native(**msgspec.structs.asdict(self), log=True)


class OffloadRequest(ScenarioRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request. With `after`, it arrives after another one ended; `arrival_step` is then NEVER if that never did."""

    arrival_step: int = NEVER
    after: str | None = None
    delay: int = 0


class OffloadScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload by steps, with a host tier."""

    name: str
    config: ScenarioConfig
    offload: LockstepOffload
    max_steps: int
    requests: list[OffloadRequest]
    aborts: list[ScenarioAbort] = []


class OffloadRun:
    """A scenario on a new engine. `halted_at`: the first step of a halt that lasts to the end, if any."""

    def __init__(
        self,
        scenario: OffloadScenario,
        profile: VersionProfile,
        rules: OffloadProfile,
        *,
        check: bool = False,
    ) -> None:
        self.scenario = scenario
        self.halted_at: int | None = None
        config = scenario.config
        self._engine = VllmEngine(
            config.engine_config(profile, check=check, offload=scenario.offload.native(rules)),
            constant_timing(1.0, 1.0),
        )
        self._recorder = StepRecorder(config.block_size, config.async_scheduling)
        self._host = HostRecorder(config.async_scheduling)
        self._numbers: dict[str, int] = {}
        self._to_come = list(enumerate(scenario.requests))
        self._check = check

    def lines(self) -> Iterator[Line]:
        """Yield the recording's lines after its header: one per step, then the totals. Call it once."""
        engine, recorder, host = self._engine, self._recorder, self._host
        aborts = Aborts(engine, self._numbers, self.scenario.aborts)
        lines: list[Line] = []
        while self._busy() and recorder.steps < self.scenario.max_steps:
            step = recorder.steps
            self._submit(step)
            aborted = host.run_step(engine, aborts, step, check=self._check)
            recorder.totals["finished"] += len(aborted)
            lines.append({**recorder.ended(engine), "aborted": aborted, **host.describe_step(engine)})
            self.halted_at = (step if self.halted_at is None else self.halted_at) if engine.stuck else None
        host.name(lines, recorder.numbers)
        yield from lines
        reason = "max_steps" if self._busy() else "done"
        yield {"end": {"reason": reason, "steps": recorder.steps, **recorder.totals, **host.totals(lines)}}

    def _busy(self) -> bool:
        return self._recorder.totals["finished"] < len(self.scenario.requests) or self._engine.offload_pending

    def _submit(self, step: int) -> None:
        config = self.scenario.config
        for index, request in self._to_come:
            if request.arrival_step > step:
                continue
            number, firsts = submit(self._engine, config, index, request)
            self._recorder.first_tokens.update(firsts)
            self._numbers[request.id] = number
            self._host.names[number] = request.id
        self._to_come = [item for item in self._to_come if item[1].arrival_step > step]


class HostRecorder:
    """Write each step's host activity in a recording's format."""

    def __init__(self, asynchronous: bool) -> None:
        self.names: dict[int, str] = {}  # of requests; finished ones too, because they still store
        self.loading: list[str] = []
        self.aborted = 0
        self.aborted_loading = 0
        self._asynchronous = asynchronous
        self._stored: dict[int, list[int]] = {}  # hashes by job
        self._held_back: list[Line] = []
        self._steps = 0

    def run_step(self, engine: VllmEngine, aborts: Aborts, step: int, *, check: bool) -> list[str]:
        """Run a step with its aborts, and return the aborted requests."""
        loading = self.loading
        before = aborts.play(step, "before")
        engine.begin_recorded_step(step * STEP_NS)
        loading_now = [self.names[r] for r in engine.loading]
        mid = aborts.play(step, "mid")
        engine.end_recorded_step((step + 1) * STEP_NS)
        if check:
            engine.check()
        self.aborted += len(before) + len(mid)
        self.aborted_loading += sum(name in loading for name in before)
        self.aborted_loading += sum(name in loading_now for name in mid)
        return before + mid

    def describe_step(self, engine: VllmEngine) -> Line:
        """The part of a step's line; chunks are named by their sequence hashes yet."""
        taken: dict[str, Any] = engine.take_offload_line()
        name = self.names.__getitem__
        for job in taken["stores"]:
            self._stored[job["job"]] = job["hashes"]
        events = self._held_back + [{"type": "removed", "h": keys} for keys in taken["evicted"]]
        for job_id in taken["done"]:
            events += [{"type": "stored", "h": [key]} for key in self._stored.pop(job_id, [])]
        # Asynchronously the first schedule is followed by no update, so its events wait for the next.
        held = self._asynchronous and self._steps == 0
        self._held_back = events if held else []
        self._steps += 1
        self.loading = [name(r) for r in taken["loading"]]
        # vLLM lists new requests, then running ones, then resumed ones.
        blocks = sorted(taken["blocks"], key=lambda row: (not row[1], row[2]))
        return {
            "lookups": [[name(r), local, hit] for r, local, hit in taken["lookups"]],
            "external": {name(job["request"]): job["tokens"] for job in taken["loads"]},
            "loading": self.loading,
            "loads": [
                {**self._job(job), "table": [block + 1 for block in job["table"]]} for job in taken["loads"]
            ],
            "stores": [self._job(job) for job in taken["stores"]],
            "store_failed": [name(r) for r in taken["refused"]],
            "flush": taken["flush"],
            "blocks": {name(r): [block + 1 for block in slots] for r, _, _, slots in blocks},
            "jobs_done": taken["done"],
            "evicted": [key for keys in taken["evicted"] for key in keys],
            "host_events": [] if held else events,
            "host_chunks": taken["resident"],
            "host_ready": taken["ready"],
            "host_lru": taken["oldest"],
        }

    def _job(self, job: dict[str, Any]) -> Line:
        # vLLM counts its reserved block 0.
        return {
            "job": job["job"],
            "req": self.names[job["request"]],
            "chunks": job["chunks"],
            "h": job["hashes"],
            "gpu": [block + 1 for block in job["device"]],
            "host": job["host"],
            **({"groups": job["groups"]} if "groups" in job else {}),
        }

    @staticmethod
    def name(lines: list[Line], numbers: dict[int, int]) -> None:
        """Replace hashes by the numbers in the device's events, or by negative ones if they are not in events."""
        known = dict(numbers)
        unknown = 0

        def number(keys: list[int]) -> list[int]:
            nonlocal unknown
            for key in keys:
                if key not in known:
                    unknown -= 1
                    known[key] = unknown
            return [known[key] for key in keys]

        for line in lines:
            for job in line["loads"] + line["stores"]:
                job["h"] = number(job["h"])
            line["evicted"] = number(line["evicted"])
            for event in line["host_events"]:
                event["h"] = number(event["h"])
            if line["host_lru"] is not None:
                line["host_lru"] = number(line["host_lru"])

    def totals(self, lines: list[Line]) -> dict[str, int]:
        """Return the host's part of the last line."""
        return {
            "load_jobs": sum(len(line["loads"]) for line in lines),
            "load_chunks": sum(len(job["chunks"]) for line in lines for job in line["loads"]),
            "store_jobs": sum(len(line["stores"]) for line in lines),
            "store_chunks": sum(len(job["chunks"]) for line in lines for job in line["stores"]),
            "store_failed": sum(len(line["store_failed"]) for line in lines),
            "host_evictions": sum(len(line["evicted"]) for line in lines),
            "flushed": sum(len(line["flush"]) for line in lines),
            "lookup_deferred": sum(hit is None for line in lines for _, _, hit in line["lookups"]),
            "external_tokens": sum(sum(line["external"].values()) for line in lines),
            "aborted": self.aborted,
            "aborted_loading": self.aborted_loading,
        }

"""Run scenarios with several KV cache groups and write the engine's steps in a recording's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from understudy._core import GroupLayout, VllmEngine, VllmEngineConfig, constant_timing, with_groups
from understudy.conformance.recorder import STEP_NS
from understudy.conformance.submit import submit
from understudy.engines.kv_groups import KvCacheGroup  # noqa: TC001  (msgspec reads the annotation)
from understudy.run.step_line import describe_step
from understudy.workload.scenario import ScenarioConfig, ScenarioRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from understudy._core import VllmOffload
    from understudy.engines.profiles import VersionProfile

COUNTS = (
    "finished",
    "preemptions",
    "scheduled_tokens",
    "cached_tokens",
    "stored_blocks",
    "removed_blocks",
    "copies",
)


class GroupScenarioConfig(ScenarioConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of a scheduler with several KV cache groups."""

    groups: list[KvCacheGroup] = msgspec.field(default_factory=list)
    prefix_cache_retention_interval: int | None = 0
    prefix_match_unit: int | None = None

    def group_config(
        self, profile: VersionProfile, *, offload: VllmOffload | None = None, group_events: bool = True
    ) -> VllmEngineConfig:
        """Return the engine's settings under a version profile.

        `group_events`: the engine keeps the events of its groups, instead of publishing them and those of the host.
        """
        own = ("groups", "prefix_cache_retention_interval", "prefix_match_unit")
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in own}
        return with_groups(
            ScenarioConfig(**fields).engine_config(profile, offload=offload),
            [group.native() for group in self.groups],
            prefix_match_unit=self.prefix_match_unit or 0,
            prefix_cache_retention_interval=self.prefix_cache_retention_interval,
            group_events=group_events,
        )


class GroupWork(Protocol):
    """Part of a scenario that a run reads, with or without a host."""

    @property
    def config(self) -> GroupScenarioConfig:
        """Settings of the scheduler."""

    @property
    def max_steps(self) -> int:
        """Steps after which the run ends in any case."""

    @property
    def requests(self) -> Sequence[ScenarioRequest]:
        """Requests in the order of submission."""


class GroupScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workload by steps, for an engine with several KV cache groups."""

    name: str
    config: GroupScenarioConfig
    max_steps: int
    requests: list[ScenarioRequest]


def describe_sizes(scenario: GroupWork, config: VllmEngineConfig) -> dict[str, Any]:
    """Return the sizes that follow from the groups, as a recording's header has them."""
    layout = GroupLayout(config)
    caching = scenario.config.enable_prefix_caching
    several = len(scenario.config.groups) > 1
    blocks = layout.blocks_per_request
    return {
        "scheduler_block_size": layout.scheduler_block_size,
        "hash_block_size": layout.hash_block_size,
        "block_size": layout.block_size,
        "coordinator": "KVCacheCoordinatorNoPrefixCache"
        if not caching
        else ("HybridKVCacheCoordinator" if several else "UnitaryKVCacheCoordinator"),
        "partial_hits": layout.partial_hits,
        "max_in_flight_tokens": layout.max_in_flight_tokens,
        "admission_caps": layout.admission_caps,
        "max_concurrency": scenario.config.num_blocks / blocks,
    }


class GroupRun:
    """One run of a scenario, line by line."""

    def __init__(
        self,
        scenario: GroupWork,
        profile: VersionProfile,
        *,
        check: bool = False,
        offload: VllmOffload | None = None,
        group_events: bool = True,
    ) -> None:
        self.scenario = scenario
        self.config = scenario.config.group_config(profile, offload=offload, group_events=group_events)
        self.engine = VllmEngine(self.config, constant_timing(1.0, 1.0))
        self._check = check
        self._numbers: dict[int, int] = {}
        self._tokens: dict[int, npt.NDArray[np.uint32]] = {}

    def lines(self, *, count_lookups: bool = True) -> Iterator[dict[str, Any]]:
        """Yield a line per step, then the totals, with those of lookups if they were recorded."""
        engine, requests = self.engine, self.scenario.requests
        totals = dict.fromkeys(COUNTS, 0)
        to_come = list(enumerate(requests))
        step = 0
        while totals["finished"] < len(requests) and step < self.scenario.max_steps:
            for index, request in to_come:
                if request.arrival_step <= step:
                    self.submit(index, request)
            to_come = [(index, request) for index, request in to_come if request.arrival_step > step]
            engine.begin_recorded_step(step * STEP_NS)
            engine.end_recorded_step((step + 1) * STEP_NS)
            if self._check:
                engine.check()
            yield self.describe(step, totals)
            step += 1
        done = totals["finished"] == len(requests)
        names = ("requests", "queries", "hits")
        stats = {
            **dict(zip(names, engine.group_hits(False), strict=True)),
            **{f"preempted_{name}": n for name, n in zip(names, engine.group_hits(True), strict=True)},
        }
        reason = "done" if done else "max_steps"
        lookups = {"prefix_stats": stats} if count_lookups else {}
        yield {"end": {"reason": reason, "steps": step, **totals, **lookups}}

    def describe(self, step: int, totals: dict[str, int]) -> dict[str, Any]:
        """Return the line of the step that has ended, and add it to the totals."""
        engine = self.engine
        # Asynchronously the first schedule is followed by no update, so its events wait for the next.
        events = [] if self.scenario.config.async_scheduling and step == 0 else self._describe_events()
        line = describe_step(engine, step, events)
        del line["kv_events"]
        line["held"] = engine.held_by_group()
        line["kv_events"] = events
        copies = engine.block_copies
        if copies:
            line["copies"] = [[source + 1, copy + 1] for source, copy in copies]
        for name, count in (
            ("finished", len(line["finished"])),
            ("preemptions", len(line["preempted"])),
            ("scheduled_tokens", sum(line["scheduled"].values())),
            ("cached_tokens", sum(line["cached"].values())),
            ("copies", len(copies)),
        ):
            totals[name] += count
        for event in events:
            totals[f"{event['type']}_blocks"] += event["n"]
        return line

    def submit(self, index: int, request: ScenarioRequest) -> int:
        """Submit a request of the scenario; return its number in the engine."""
        config = msgspec.structs.replace(self.scenario.config, block_size=self.config.block_size)
        number, _ = submit(self.engine, config, index, request)
        self._tokens[number] = request.tokens(index, config.max_model_len)
        return number

    def _number(self, content: int) -> int:
        return self._numbers.setdefault(content, len(self._numbers))

    def _describe_events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for (
            stored,
            group,
            size,
            parent,
            position,
            length,
            request,
            hashes,
            ends,
        ) in self.engine.take_group_events():
            if not stored:
                last = events[-1] if events else {}
                if last.get("type") != "removed" or last["g"] != group:
                    last = {"type": "removed", "n": 0, "g": group, "h": []}
                    events.append(last)
                last["h"].append(self._number(hashes[0]))
                last["n"] += 1
                continue
            kind, window = self.scenario.config.groups[group].describe_kind()
            before = None if parent is None else self._number(parent)
            tokens = self._tokens[request]
            events.append(
                {
                    "type": "stored",
                    "n": len(hashes),
                    "g": group,
                    "kind": kind,
                    "window": window,
                    "bs": size,
                    "h": [self._number(content) for content in hashes],
                    "parent": before,
                    "pos": position,
                    "len": length,
                    "ends": ends,
                    "first_tokens": [int(tokens[end - size]) for end in ends],
                }
            )
        return events

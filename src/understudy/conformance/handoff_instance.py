"""One engine of a recorded pair of prefill and decode: its queue of batches and the lines that it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from understudy._core import RequestSpec, VllmEngine, constant_timing, with_multi, with_transfer
from understudy.conformance.handoff_scenario import NS_PER_S
from understudy.conformance.multi_lines import HostLines, name_content
from understudy.conformance.submit import blocks_of
from understudy.engines.offload_profiles import offload_profile
from understudy.run.step_line import RecordedEvents

if TYPE_CHECKING:
    from understudy.conformance.handoff_scenario import HandOffScenario, SideName
    from understudy.core_types import HandOffLine
    from understudy.engines.profiles import VersionProfile

Line = dict[str, Any]

ALWAYS = {
    "i",
    "tick",
    "step",
    "reset",
    "free_blocks",
    "deferred",
    "free_after_schedule",
    "host_chunks",
    "host_ready",
}
KEYS = [
    *(
        "i",
        "tick",
        "step",
        "reset",
        "aborted",
        "free_after_schedule",
        "recv",
        "to_send",
        "heartbeat",
        "in_batch",
    ),
    *("not_processed", "notified", "expired", "leases", "scheduled", "new", "preempted", "resumed", "cached"),
    *("reads", "registered", "notify_only", "lookups", "finished", "handoff", "recved", "failed", "sent"),
    *("invalid", "running", "holding", "waiting", "loading", "held", "free_blocks", "free_head", "deferred"),
    *(
        "kv_events",
        "told",
        "loads",
        "stores",
        "store_failed",
        "flush",
        "blocks",
        "posted",
        "jobs_done",
        "evicted",
    ),
    *("host_events", "host_chunks", "host_ready", "host_lru"),
]
PLACES = {key: place for place, key in enumerate(KEYS)}


def key_place(key: str) -> int:
    """Place of a key in a line."""
    return PLACES.get(key, len(PLACES))


class Pair(Protocol):
    """What joins the two instances: the scenario and the wire."""

    scenario: HandOffScenario
    names: list[str]

    def abort(self, instance: Instance, tick: int, when: str, now_ns: int) -> list[list[str]]:
        """Abort the requests that are due; return their names with the states that they were in."""

    def hand_off(self, instance: Instance, index: int, cached: dict[int, int]) -> Line:
        """Send a request whose prompt the prefill instance has computed to the decode instance."""

    def describe_pull(self, index: int, blocks: list[int]) -> Line:
        """Describe a pull request in a recording's words."""

    def poll(
        self,
        instance: Instance,
        line: Line,
        logged: HandOffLine,
        tick: int,
        now_ns: int,
        jobs: list[int],
        loaded: list[int],
    ) -> None:
        """Run the instance's worker for an iteration."""


class Instance:
    """One engine of the pair, its queue of batches and its lines."""

    def __init__(
        self, side: SideName, run: Pair, profile: VersionProfile, version: str, *, check: bool
    ) -> None:
        scenario = run.scenario
        settings = scenario.p if side == "p" else scenario.d
        self.side = side
        self.settings = settings.side
        self.asynchronous = settings.config.async_scheduling
        host = settings.side.host
        offload = None
        if host is not None:
            offload = offload_profile(version).native(
                host_chunks=host.host_chunks,
                blocks_per_chunk=host.blocks_per_chunk,
                eviction_policy=host.eviction_policy,
                offload_prompt_only=host.offload_prompt_only,
                log=True,
            )
        config = settings.config.engine_config(profile, check=check, offload=offload)
        config = with_transfer(config, settings.side.transfer(side))
        host_first = settings.side.connector == "multi_rev"
        if host is not None:
            consumes = settings.side.role(side) != "kv_producer"
            config = with_multi(config, consumes=consumes, host_first=host_first, log=True)
        self.engine = VllmEngine(config, constant_timing(1.0, 1.0))
        self.host = None if host is None else HostLines(self.engine, host, run.names, host_first=host_first)
        self.arrived: dict[int, None] = {}
        self.steps = 0
        self._run = run
        self._config = settings.config
        self._queued = 0
        self._events = RecordedEvents(settings.config.block_size)
        self._cached: dict[int, int] = {}
        self.reports: list[Line] = []
        self._check = check
        self._published: list[Line] = []
        """Events ahead of a reset, and its own."""
        self._resets = sorted(reset.tick for reset in run.scenario.resets if reset.side == side)

    def arrive(self, index: int, *, leg: str, now_ns: int) -> None:
        """Submit a request of the scenario."""
        request = self._run.scenario.requests[index]
        plain = request.scenario_request()
        tokens = plain.tokens(index, self._config.max_model_len)
        identities, firsts = blocks_of(tokens, self._config.block_size)
        self._events.first_tokens.update(firsts)
        self.arrived[index] = None
        spec = RequestSpec(
            index,
            request.id,
            len(plain.prompt_tokens()),
            1 if leg == "prefill" else request.max_tokens,
            identities,
            priority=request.priority,
            arrival_time=index,
            leg=leg,
        )
        self.engine.submit(spec, now_ns)

    @property
    def has_work(self) -> bool:
        """Whether the instance iterates."""
        return self._queued > 0 or self._has_requests

    @property
    def _has_requests(self) -> bool:
        engine = self.engine
        pending = engine.handoff_pending or engine.offload_pending
        return bool(engine.running or engine.num_waiting or engine.has_ended or pending)

    def reset_due(self, tick: int) -> bool:
        """Whether the caches are to be dropped; takes the order."""
        due = [when for when in self._resets if when <= tick]
        self._resets = self._resets[len(due) :]
        return bool(due)

    def reset(self, now_ns: int) -> bool:
        """Drop all caches; return whether all were."""
        published = self._events.describe(self.engine.peek_events())
        self.engine.take_events()
        empty = self.engine.free_blocks == self._config.num_blocks - 1  # less the null block
        done = self.engine.reset_caches(now_ns)
        if empty:  # one event for all blocks
            self._events.describe(self.engine.peek_events())
            self.engine.take_events()
            published.append({"type": "cleared"})
        self._published += published
        if self.host is not None:
            self.host.reset()
        return done

    def iterate(self, tick: int, now_ns: int, reset: bool | None = None) -> Line:
        """Run one iteration and return its line. `reset`: the result of a reset ahead of it."""
        run, engine = self._run, self.engine
        line: Line = {"i": self.side, "tick": tick, "step": None}
        if reset is not None:
            line["reset"] = reset
        line["aborted"] = run.abort(self, tick, "before", now_ns)
        scheduled = self._has_requests
        tokens = False
        if scheduled:
            line["step"] = self.steps
            self.steps += 1
            engine.begin_recorded_step(now_ns)
            self._queued += 1
            tokens = self._describe_schedule(line, tick, now_ns)
        elif self.asynchronous:
            engine.begin_last_update(now_ns)
        line["aborted"] = line["aborted"] + run.abort(self, tick, "mid", now_ns)
        updated = not self.asynchronous or self._queued > 1 or not scheduled
        self._end_step(line, now_ns, updated)
        if not updated and not tokens and not self._has_requests:  # nothing else will be scheduled behind it
            engine.begin_last_update(now_ns)
            self._end_step(line, now_ns, True)
            updated = True
        self._queued -= updated
        self._describe_state(line, updated)
        return {key: line[key] for key in KEYS if key in line and (line[key] or key in ALWAYS)}

    def stay(self, tick: int, reset: bool) -> Line:
        """Return the line of a reset without an iteration."""
        line: Line = {"i": self.side, "tick": tick, "step": None, "reset": reset}
        self._describe_state(line, False)
        return {key: line[key] for key in KEYS if key in line and (line[key] or key in ALWAYS)}

    def name_content(self, lines: list[Line]) -> None:
        """Name the content of the host in the lines of this instance."""
        name_content(lines, self._events.numbers)

    def _end_step(self, line: Line, now_ns: int, updates: bool) -> None:
        effects = self.engine.end_recorded_step(now_ns)
        if updates:
            line |= self.reports.pop(0)
        if self._check:
            self.engine.check()
        names = self._run.names
        # vLLM ends requests that failed after those that are complete.
        finished = [[names[r.id], "length"] for r in effects.finished if r.reason in ("length", "stop")]
        failed = [[names[r.id], "error"] for r in effects.finished if r.reason == "failed"]
        line["finished"] = line.get("finished", []) + finished + failed
        if self.side == "p":
            handoff = line.setdefault("handoff", {})
            for record in effects.finished:
                if record.id in self.engine.held:
                    handoff[names[record.id]] = self._run.hand_off(self, record.id, self._cached)

    def _describe_schedule(self, line: Line, tick: int, now_ns: int) -> bool:
        run, engine = self._run, self.engine
        names = run.names
        logged = engine.take_handoff_line()
        line["free_after_schedule"] = engine.free_after_schedule
        line["recv"] = [run.describe_pull(r, blocks) for r, blocks in logged["pulls"]]
        line["to_send"] = {names[r]: end / NS_PER_S for r, end in logged["to_send"]}
        line["heartbeat"] = [names[r] for r in logged["heartbeat"]]
        line["in_batch"] = [names[r] for r in logged["in_batch"]]
        line["not_processed"] = [names[r] for r in logged["not_processed"]]
        line["scheduled"] = {names[r]: tokens for r, tokens in engine.scheduled}
        line["new"] = [names[r] for r, resumed, _ in engine.admitted if not resumed]
        line["preempted"] = [names[r] for r in engine.preempted]
        line["resumed"] = [names[r] for r, resumed, _ in engine.admitted if resumed]
        admitted = sorted(engine.admitted, key=lambda row: row[1])  # new ones first
        line["cached"] = {names[r]: cached for r, _, cached in admitted}
        for r, resumed, cached in engine.admitted:
            if not resumed and self.host is None:
                self._cached[r] = cached
        line["lookups"] = [[names[r], local, external] for r, local, external in logged["lookups"]]
        jobs: list[int] = []
        loaded: list[int] = []
        if self.host is not None:
            jobs, loaded = self.host.describe_schedule(line, tick)
            self._cached |= self.host.found
        run.poll(self, line, logged, tick, now_ns, jobs, loaded)
        return bool(engine.scheduled)

    def _describe_state(self, line: Line, updated: bool) -> None:
        engine, names = self.engine, self._run.names
        loading = set(engine.loading)
        holding = engine.holding
        waiting = [r for r in engine.waiting_head(1 << 30) if r not in set(holding)]
        held = set(engine.held) | set(engine.orphans)
        line["running"] = [names[r] for r in engine.running]
        line["holding"] = [names[r] for r in holding]
        line["waiting"] = [names[r] for r in waiting]
        line["loading"] = [names[r] for r in holding if r in loading]
        line["held"] = [names[r] for r in self.arrived if r in held]
        line["free_blocks"] = engine.free_blocks
        line["free_head"] = [block + 1 for block in engine.free_head(4)]
        line["deferred"] = engine.deferred_blocks
        if self.host is not None:
            if updated:
                self.host.describe_update(line)
            self.host.describe_state(line)
        if updated:
            line["kv_events"] = self._published + self._events.describe(engine.peek_events())
            self._published = []
            engine.take_events()

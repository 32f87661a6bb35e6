"""Recordings of two real schedulers, prefill and decode, joined by vLLM's NixlConnector: both run tick by tick."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from understudy._core import RequestSpec, VllmEngine, constant_timing, with_multi, with_transfer
from understudy.conformance.handoff_scenario import NS_PER_S, HandOffScenario
from understudy.conformance.handoff_wire import Wire
from understudy.conformance.multi_lines import HostLines, name_content
from understudy.conformance.submit import blocks_of
from understudy.engines.offload_profiles import offload_profile
from understudy.run.step_line import RecordedEvents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.conformance.handoff_scenario import SideName
    from understudy.conformance.handoff_wire import Transfer
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
COUNTED = (
    "aborted",
    "expired",
    "failed",
    "finished",
    "heartbeat",
    "notify_only",
    "preempted",
    "reads",
    "recved",
    "sent",
)


def key_place(key: str) -> int:
    """Place of a key in a line."""
    return PLACES.get(key, len(PLACES))


class Instance:
    """One engine of the pair, its queue of batches and its lines."""

    def __init__(
        self, side: SideName, run: HandOffRun, profile: VersionProfile, version: str, *, check: bool
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


class HandOffRun:
    """A scenario on two new engines."""

    def __init__(
        self, scenario: HandOffScenario, profile: VersionProfile, version: str = "", *, check: bool = False
    ) -> None:
        self.scenario = scenario
        self.names = [request.id for request in scenario.requests]
        self._index = {name: index for index, name in enumerate(self.names)}
        self._wire = Wire(scenario)
        self._p = Instance("p", self, profile, version or profile.name, check=check)
        self._d = Instance("d", self, profile, version or profile.name, check=check)
        self._to_arrive = list(range(len(self.names)))
        self._on_the_way: dict[int, int] = {}
        self._gone: set[int] = set()
        self._tick = 0

    def lines(self) -> Iterator[Line]:
        """Yield the recording's lines after its header: one per iteration of an instance, then the totals."""
        if not self.scenario.has_host:
            yield from self._lines()
            return
        *lines, end = self._lines()
        for instance in (self._p, self._d):
            instance.name_content([line for line in lines if line["i"] == instance.side])
        yield from lines
        yield end

    def _lines(self) -> Iterator[Line]:
        totals: Counter[str] = Counter()
        reason = "max_ticks"
        tick = 0
        for tick in range(self.scenario.max_ticks):
            now_ns = round(tick * self.scenario.wire.tick_s * NS_PER_S)
            self._tick = tick
            self._arrive(tick, now_ns)
            for instance in (self._p, self._d):
                if not instance.settings.iterates(tick):
                    continue
                reset = instance.reset(now_ns) if instance.reset_due(tick) else None
                if instance.has_work:
                    line = instance.iterate(tick, now_ns, reset)
                elif reset is not None:
                    line = instance.stay(tick, reset)
                else:
                    continue
                self._count(instance, line, totals)
                yield line
            if not (self._to_arrive or self._on_the_way or self._p.has_work or self._d.has_work):
                reason = "done"
                break
        counts = {key: totals[key] for key in sorted(totals) if totals[key]}
        yield {"end": {"reason": reason, "ticks": tick + 1, "gone": len(self._gone), **counts}}

    def _arrive(self, tick: int, now_ns: int) -> None:
        requests = self.scenario.requests
        parallel = self.scenario.wire.dispatch == "parallel"
        due = [index for index in self._to_arrive if requests[index].arrival_tick <= tick]
        self._to_arrive = [index for index in self._to_arrive if requests[index].arrival_tick > tick]
        for index in due:
            if requests[index].local:
                self._d.arrive(index, leg="whole", now_ns=now_ns)
                continue
            self._p.arrive(index, leg="prefill", now_ns=now_ns)
            if parallel:
                self._on_the_way[index] = tick
        for index in sorted(index for index, when in self._on_the_way.items() if when <= tick):
            del self._on_the_way[index]
            self._d.arrive(index, leg="decode", now_ns=now_ns)

    def hand_off(self, instance: Instance, index: int, cached: dict[int, int]) -> Line:
        """The prefill instance has computed a prompt: send the request on its way."""
        blocks = [block + 1 for block in instance.engine.held_blocks(index)]
        self._wire.handed[index] = blocks
        request = self.scenario.requests[index]
        wire = self.scenario.wire
        if request.drop:
            self._gone.add(index)
        elif wire.dispatch != "parallel":
            self._on_the_way[index] = self._tick + (wire.proxy if request.proxy is None else request.proxy)
        tokens = len(request.scenario_request().prompt_tokens())
        return {"blocks": blocks, "tokens": tokens, "cached": cached[index]}

    def describe_pull(self, index: int, blocks: list[int]) -> Line:
        """A pull request in a recording's words."""
        push = self.scenario.mode == "push"
        return {
            "req": self.names[index],
            "local": [block + 1 for block in blocks],
            "remote": [] if push else self._wire.handed[index],
            "await": not push and bool(blocks),
        }

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
        """Run the instance's worker for an iteration: post transfers, then poll.

        `jobs` are copies of its host that are done, and `loaded` the requests whose loads are.
        """
        push = self.scenario.mode == "push"
        wire, names = self._wire, self.names
        sent: list[int] = []
        received: list[int] = []
        failed: list[int] = []
        lost: list[int] = []
        if instance.side == "p":
            if push:
                finished = [r for r, _ in logged["to_send"]]
                line["reads"] = [
                    self._describe_write(transfer) for transfer in wire.begin_writes(tick, finished)
                ]
                wire.unread.sort(key=lambda transfer: transfer.done)
            ends = wire.read_ends(tick)
            heartbeats, wire.heartbeats = wire.heartbeats, []
            # vLLM polls its own WRITEs after the leases, but reads notifications of READs before them.
            sent, expired, leases = instance.engine.poll_sender(heartbeats, [] if push else ends, now_ns)
            if push:
                written, _, leases = instance.engine.poll_sender([], ends, now_ns)
                sent = sorted(sent + written)
            for r in sent:
                wire.finished.pop(r, None)
            line["notified"] = [] if push else [names[r] for r in ends]
            line["expired"] = [names[r] for r in expired]
            line["leases"] = {names[r]: end / NS_PER_S for r, end in leases}
        else:
            pulls = [(r, [block + 1 for block in blocks]) for r, blocks in logged["pulls"]]
            if push:
                registered, at_once = wire.register(tick, pulls, logged["heartbeat"])
                line["registered"] = [names[r] for r in registered]
                line["notify_only"] = []
            else:
                reads, notified, at_once = wire.begin_reads(tick, pulls, logged["heartbeat"])
                line["reads"] = [self._describe_read(transfer) for transfer in reads]
                line["notify_only"] = [names[r] for r in notified]
            failed = [transfer.request for transfer in at_once]
            lost = [block for transfer in at_once for block in transfer.blocks]
            ended = wire.report_ends(tick)
            if push:
                ended = [transfer for transfer in ended if not transfer.failed]
                line["notified"] = [names[transfer.request] for transfer in ended]
            failed += [transfer.request for transfer in ended if transfer.failed]
            lost += [block for transfer in ended if transfer.failed for block in transfer.blocks]
            received = sorted([transfer.request for transfer in ended if not transfer.failed] + failed)
        received = sorted(received + loaded)
        # These are part of the update that reads them, which may be that of a later iteration.
        instance.reports.append(
            {
                "jobs_done": jobs,
                "recved": [names[r] for r in received],
                "failed": [names[r] for r in sorted(failed)],
                "sent": [names[r] for r in sent],
                "invalid": sorted(lost),
            }
        )
        instance.engine.give_report(sent=sent, received=received, failed=failed, jobs=jobs)

    def _describe_read(self, transfer: Transfer) -> Line:
        remote = self._wire.handed[transfer.request]
        return {
            "req": self.names[transfer.request],
            "local": transfer.blocks,
            "remote": remote[len(remote) - len(transfer.blocks) :],
            "done": transfer.done,
        }

    def _describe_write(self, transfer: Transfer) -> Line:
        own = self._wire.handed[transfer.request]
        return {
            "req": self.names[transfer.request],
            "local": own[len(own) - len(transfer.blocks) :],
            "remote": transfer.blocks,
            "done": transfer.done,
        }

    def abort(self, instance: Instance, tick: int, when: str, now_ns: int) -> list[list[str]]:
        """Abort the requests that are due; returns their names with the states that they were in."""
        aborted = []
        for abort in self.scenario.aborts:
            if (abort.side, abort.tick, abort.when) != (instance.side, tick, when):
                continue
            index = self._index[abort.id]
            status = instance.engine.status(index)
            if status is None:
                continue
            instance.engine.cancel(index, now_ns)
            self._gone.add(index)
            aborted.append([abort.id, status])
        return aborted

    def _count(self, instance: Instance, line: Line, totals: Counter[str]) -> None:
        side = line["i"]
        if instance.host is not None:
            instance.host.count(line, totals)
        if self.scenario.has_host:
            for _, status in line.get("aborted", ()):
                totals[f"aborted_{status}_{side}"] += 1
            totals["errors"] += sum(reason == "error" for _, reason in line.get("finished", ()))
            totals[f"resets_{side}"] += "reset" in line
        for key in COUNTED:
            totals[f"{key}_{side}"] += len(line.get(key, ()))
        totals[f"scheduled_tokens_{side}"] += sum(line.get("scheduled", {}).values())
        totals[f"steps_{side}"] += 1
        totals["read_blocks"] += sum(len(read["local"]) for read in line.get("reads", ()))
        if side == "d":
            self._gone.update(self._index[name] for name, _ in line.get("finished", ()))
            if "reads" in line and not self.scenario.has_host:
                totals["local_hit_tokens_d"] += sum(local for _, local, _ in line.get("lookups", ()))

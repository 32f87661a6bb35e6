"""Recordings of two real schedulers, prefill and decode, joined by vLLM's NixlConnector: both run tick by tick."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from understudy._core import RequestSpec, VllmEngine, constant_timing, with_transfer
from understudy.conformance.handoff_scenario import NS_PER_S, HandOffScenario
from understudy.conformance.handoff_wire import Wire
from understudy.conformance.submit import blocks_of
from understudy.run.step_line import RecordedEvents

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.conformance.handoff_scenario import SideName
    from understudy.conformance.handoff_wire import Transfer
    from understudy.core_types import HandOffLine
    from understudy.engines.profiles import VersionProfile

Line = dict[str, Any]

ALWAYS = {"i", "tick", "step", "free_blocks", "deferred", "free_after_schedule"}
KEYS = [
    *("i", "tick", "step", "aborted", "free_after_schedule", "recv", "to_send", "heartbeat", "in_batch"),
    *("not_processed", "notified", "expired", "leases", "scheduled", "new", "preempted", "resumed", "cached"),
    *("reads", "registered", "notify_only", "lookups", "finished", "handoff", "recved", "failed", "sent"),
    *("invalid", "running", "holding", "waiting", "loading", "held", "free_blocks", "free_head", "deferred"),
    "kv_events",
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

    def __init__(self, side: SideName, run: HandOffRun, profile: VersionProfile, *, check: bool) -> None:
        scenario = run.scenario
        settings = scenario.p if side == "p" else scenario.d
        self.side = side
        self.settings = settings.side
        self.asynchronous = settings.config.async_scheduling
        config = settings.config.engine_config(profile, check=check)
        transfer = settings.side.transfer(side)
        self.engine = VllmEngine(with_transfer(config, transfer), constant_timing(1.0, 1.0))
        self.arrived: dict[int, None] = {}
        self.steps = 0
        self._run = run
        self._config = settings.config
        self._queued = 0
        self._events = RecordedEvents(settings.config.block_size)
        self._cached: dict[int, int] = {}
        self.reports: list[Line] = []
        self._check = check

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
        return bool(engine.running or engine.num_waiting or engine.has_ended or engine.handoff_pending)

    def iterate(self, tick: int, now_ns: int) -> Line:
        """Run one iteration and return its line."""
        run, engine = self._run, self.engine
        line: Line = {"i": self.side, "tick": tick, "step": None}
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
            if not resumed:
                self._cached[r] = cached
        line["lookups"] = [[names[r], local, external] for r, local, external in logged["lookups"]]
        run.poll(self, line, logged, tick, now_ns)
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
        if updated:
            line["kv_events"] = self._events.describe(engine.peek_events())
            engine.take_events()


class HandOffRun:
    """A scenario on two new engines."""

    def __init__(self, scenario: HandOffScenario, profile: VersionProfile, *, check: bool = False) -> None:
        self.scenario = scenario
        self.names = [request.id for request in scenario.requests]
        self._index = {name: index for index, name in enumerate(self.names)}
        self._wire = Wire(scenario)
        self._p = Instance("p", self, profile, check=check)
        self._d = Instance("d", self, profile, check=check)
        self._to_arrive = list(range(len(self.names)))
        self._on_the_way: dict[int, int] = {}
        self._gone: set[int] = set()
        self._tick = 0

    def lines(self) -> Iterator[Line]:
        """Yield the recording's lines after its header: one per iteration of an instance, then the totals."""
        totals: Counter[str] = Counter()
        reason = "max_ticks"
        tick = 0
        for tick in range(self.scenario.max_ticks):
            now_ns = round(tick * self.scenario.wire.tick_s * NS_PER_S)
            self._tick = tick
            self._arrive(tick, now_ns)
            for instance in (self._p, self._d):
                if not (instance.settings.iterates(tick) and instance.has_work):
                    continue
                line = instance.iterate(tick, now_ns)
                self._count(line, totals)
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

    def poll(self, instance: Instance, line: Line, logged: HandOffLine, tick: int, now_ns: int) -> None:
        """Run the instance's worker for an iteration: post transfers, then poll."""
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
        # These are part of the update that reads them, which may be that of a later iteration.
        instance.reports.append(
            {
                "recved": [names[r] for r in received],
                "failed": [names[r] for r in sorted(failed)],
                "sent": [names[r] for r in sent],
                "invalid": sorted(lost),
            }
        )
        instance.engine.give_report(sent=sent, received=received, failed=failed)

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

    def _count(self, line: Line, totals: Counter[str]) -> None:
        side = line["i"]
        for key in COUNTED:
            totals[f"{key}_{side}"] += len(line.get(key, ()))
        totals[f"scheduled_tokens_{side}"] += sum(line.get("scheduled", {}).values())
        totals[f"steps_{side}"] += 1
        totals["read_blocks"] += sum(len(read["local"]) for read in line.get("reads", ()))
        if side == "d":
            self._gone.update(self._index[name] for name, _ in line.get("finished", ()))
            if "reads" in line:
                totals["local_hit_tokens_d"] += sum(local for _, local, _ in line.get("lookups", ()))

"""Recordings of two real schedulers, prefill and decode, joined by vLLM's NixlConnector: both run tick by tick."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from understudy.conformance.handoff_instance import Instance
from understudy.conformance.handoff_scenario import NS_PER_S
from understudy.conformance.handoff_wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterator

    from understudy.conformance.handoff_instance import Line
    from understudy.conformance.handoff_scenario import HandOffScenario
    from understudy.conformance.handoff_wire import Transfer
    from understudy.core_types import HandOffLine
    from understudy.engines.profiles import VersionProfile

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

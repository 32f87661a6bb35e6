"""Samples a fleet once a second and streams what has changed to the pages that watch it."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.fleets import history
from understudy.fleets.history import History
from understudy.fleets.report import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from understudy.fleets.decision_log import DecisionLog
    from understudy.fleets.report import Report
    from understudy.http import Connection
    from understudy.router.dispatch import Decision, LiveRouteRequest
    from understudy.server.settings import ServerSettings

SAMPLED_EVERY_S = 1.0
KEPT_DECISIONS = 60
SHOWN_DECISIONS = 24
_SHOWN = (*(name for name in COLUMNS if name not in ("tokens", "dead", "restarts")), "rate", "restarted")


class Monitor:
    """History, decisions and watchers of a fleet; the front end passes it a report every second."""

    def __init__(
        self,
        pools: Sequence[tuple[int, ServerSettings]],
        routing: str,
        queued: Callable[[], int],
    ) -> None:
        self.history = History()
        self._routing = routing
        self.stages: dict[str, str] = {}
        """Routing by stage (prefill, decode), where they differ."""
        self._queued = queued
        self._pools = describe_pools(pools)
        count = sum(count for count, _ in pools)
        self._rates = [0.0] * count
        self._restarted = [0.0] * count
        self._last: Report | None = None
        self._sampled_s = 0.0
        self.log: DecisionLog | None = None
        """File that gets every decision."""
        self._decisions: deque[dict[str, Any]] = deque(maxlen=KEPT_DECISIONS)
        self._new_decisions = self._decided = 0
        self._watchers: set[Connection] = set()
        self._shown: dict[str, list[Any]] = {}
        self._shown_faults: list[dict[str, Any]] = []

    # ── Samples ──

    def decided(self, decision: Decision, asked: LiveRouteRequest, worker: int, path: str, load: int) -> None:
        """Keep a routing decision for the page; what the router does not know is None."""
        self._new_decisions += 1
        self._decided += 1
        self._decisions.append(
            {
                "n": self._decided,
                "at": round(time.time(), 3),
                "worker": worker,
                "path": path,
                "tokens": asked.prompt_tokens,
                "why": self.stages.get(asked.stage, self._routing),
                "stage": asked.stage,
                "overlap": decision.overlap_blocks,
                "lower": decision.lower_overlap_blocks,
                "best": decision.best_overlap_blocks,
                "cost": None if decision.cost is None else round(decision.cost, 2),
                "score": None if decision.score is None else round(decision.score, 3),
                "reason": decision.reason,
                "ties": decision.ties,
                "waited_ms": round(decision.waited_ms, 1),
                "blocks": len(asked.prompt_blocks),
                "load": load,
            }
        )
        if self.log is not None:
            self.log.write(self._decisions[-1])

    def sample(self, report: Report) -> None:
        """Add a report to the history and send the changes to the watchers."""
        now_s, unix_s = time.monotonic(), round(time.time(), 1)
        last, passed_s = self._last, now_s - self._sampled_s
        self._last, self._sampled_s = report, now_s
        if last is not None and passed_s > 0:
            tokens = zip(report.columns["tokens"], last.columns["tokens"], strict=True)
            self._rates = [round((now - before) / passed_s, 1) for now, before in tokens]
        marks = self._compare_faults(last, report, unix_s)
        self.history.marks.extend(marks)
        self.history.add(unix_s, report.totals)
        self._watchers = {watcher for watcher in self._watchers if not watcher.closed}
        if self._watchers:
            self._send(self._watchers, self._changes(report, marks))
        self._new_decisions = 0

    def _compare_faults(self, last: Report | None, report: Report, unix_s: float) -> list[dict[str, Any]]:
        """Return marks for the faults that began or ended between two reports, and for restarts."""
        now = report.columns
        none: dict[str, list[Any]] = {"faults": [()] * len(report.ports), "restarts": [0] * len(report.ports)}
        before = none if last is None else last.columns
        found: dict[tuple[str, bool], list[int]] = {}
        if now["faults"] != before["faults"]:
            for worker, (kinds, old) in enumerate(zip(now["faults"], before["faults"], strict=True)):
                for kind in set(kinds) ^ set(old):
                    found.setdefault((kind, kind in old), []).append(worker)
        if now["restarts"] != before["restarts"]:
            for worker, (count, old) in enumerate(zip(now["restarts"], before["restarts"], strict=True)):
                if count != old:
                    self._restarted[worker] = unix_s
                    kills = found.setdefault(("kill", False), [])
                    if worker not in kills:
                        kills.append(worker)
        return [
            {"t": unix_s, "kind": kind, "ended": ended, "workers": workers}
            for (kind, ended), workers in found.items()
        ]

    # ── Watchers ──

    def state(self, report: Report) -> dict[str, Any]:
        """Describe the fleet in full."""
        return {
            "workers": {**report.columns, "rate": self._rates, "restarted": self._restarted},
            "ports": report.ports,
            "pools": self._pools,
            "faults": report.faults,
            "history": {"columns": history.COLUMNS, "rows": list(self.history.rows)},
            "marks": list(self.history.marks),
            "decisions": list(self._decisions)[-SHOWN_DECISIONS:],
            **self._now(report),
        }

    def _now(self, report: Report) -> dict[str, Any]:
        decode = self.stages.get("decode")
        return {
            "time": round(time.time(), 1),
            "routing": self._routing if decode is None else f"{self._routing}, decode: {decode}",
            "queued": self._queued(),
            "late_ms": report.late_ms,
            "summary": self.history.summary(),
        }

    def watch(self, connection: Connection, report: Report) -> None:
        """Send the full state to a page, then its changes."""
        connection.start_stream(b"cache-control: no-store\r\n")
        connection.on_close = lambda: self._watchers.discard(connection)
        if not self._watchers or self._last is None:  # later pages begin where the others are
            self._remember(report)
        state = self.state(report)
        state["workers"] = self._shown
        state["faults"] = self._shown_faults
        self._watchers.add(connection)
        self._send({connection}, state)

    def _remember(self, report: Report) -> None:
        columns = {**report.columns, "rate": self._rates, "restarted": list(self._restarted)}
        self._shown = {name: columns[name] for name in _SHOWN}
        self._shown_faults = report.faults

    def _changes(self, report: Report, marks: list[dict[str, Any]]) -> dict[str, Any]:
        """Describe the changes since the last event: by column, the workers that changed and their values."""
        before, faults = self._shown, self._shown_faults
        self._remember(report)
        changed: dict[str, tuple[list[int], list[Any]]] = {}
        for name, column in self._shown.items():
            old = before[name]
            if column != old:
                where = [index for index, value in enumerate(column) if value != old[index]]
                changed[name] = (where, [column[index] for index in where])
        changes = {**self._now(report), "changed": changed, "row": self.history.rows[-1]}
        if self._new_decisions:
            changes["decisions"] = list(self._decisions)[-min(self._new_decisions, SHOWN_DECISIONS) :]
        if marks:
            changes["marks"] = marks
        if self._shown_faults != faults:
            changes["faults"] = self._shown_faults
        return changes

    def _send(self, watchers: set[Connection], state: dict[str, Any]) -> None:
        data = b"data: " + msgspec.json.encode(state) + b"\n\n"
        for watcher in watchers:
            watcher.send_event(data)
            watcher.flush()

    @property
    def is_watched(self) -> bool:
        """True while a page is open."""
        return bool(self._watchers)

    def close(self) -> None:
        """Disconnect the watchers."""
        for watcher in list(self._watchers):
            watcher.drop()
        if self.log is not None:
            self.log.close()


def describe_pools(pools: Sequence[tuple[int, ServerSettings]]) -> list[dict[str, Any]]:
    """Describe the pools of a fleet: number of workers, model, and limits of their engines."""
    return [
        {
            "workers": count,
            "model": pool.names[0],
            "blocks": pool.engine.num_gpu_blocks,
            "block_size": pool.engine.block_size,
            "max_num_seqs": pool.engine.max_num_seqs,
            "role": "both" if pool.handoff is None else pool.handoff.stage,
        }
        for count, pool in pools
    ]

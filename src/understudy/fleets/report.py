"""A report on the workers of one process: their states, loads and faults, and totals over all of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.engines.block_counts import BlockCounts
from understudy.fleets.history import Totals
from understudy.server.quantiles import sum_counts

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from understudy.server.app import App
    from understudy.server.server import Server

STATES = ("ready", "paused", "slow", "dead", "starting", "draining", "stopped")
LATE_MS = 250.0
"""A worker whose tokens are later than this is slow: the machine does not keep up."""
SLOWING = frozenset(("slow", "delay", "slow_link"))
"""Faults that make a worker slow."""


class Report(msgspec.Struct, frozen=True):
    """The workers of one process, or of several, at one time."""

    columns: dict[str, list[Any]]
    """One value per worker."""
    ports: list[int]
    totals: Totals
    faults: list[dict[str, Any]]
    """Active faults: the order, its `workers`, and `until`, the Unix time at which it ends (None: no end)."""
    late_ms: dict[str, float]


def state_of(app: App, kinds: Sequence[str], late_ms: float, now_s: float) -> str:
    """Return the state of a worker with these faults. `now_s`: monotonic time."""
    if app.dead:
        return "dead"
    if app.stopped:
        return "stopped"
    if app.draining:
        return "draining"
    if now_s < app.ready_at_s:
        return "starting"
    if app.worker.pauses.asleep:
        return "paused"
    slow = late_ms > LATE_MS or not SLOWING.isdisjoint(kinds)
    return "slow" if slow else "ready"


def read_report(servers: Sequence[Server], late_ms: Sequence[float], late: dict[str, float]) -> Report:
    """Read the workers. `late_ms`: greatest lateness of each worker's last tokens; `late`: of all workers."""
    now_s = time.monotonic()
    rows: list[tuple[Any, ...]] = []
    first_tokens: list[array[int]] = []
    gaps: list[array[int]] = []
    faults: dict[tuple[Any, ...], dict[str, Any]] = {}
    prompts = cached = 0.0
    for server, late_of_worker in zip(servers, late_ms, strict=True):
        app, worker = server.app, server.worker
        running = waiting = 0
        usage = host = tokens = queried = found = 0.0
        for core, metrics in zip(worker.cores, worker.metrics, strict=True):
            now = core.engine.snapshot()
            running += now.running
            waiting += now.waiting + now.parked
            usage = max(usage, now.active_blocks / core.num_blocks)
            if core.has_tiers:
                host = max(host, core.host_usage)
            tokens += metrics.generation_tokens.value
            queried += metrics.queries.value
            found += metrics.hits.value
            if worker.handoff is None:
                found += metrics.external_hits.value
            else:  # read from a prefill worker, which counts its own hits
                queried -= metrics.external_hits.value
            first_tokens.append(metrics.first_token.counts)
            gaps.append(metrics.gap.counts)
        prompts += queried
        cached += found
        kinds = app.faults.kinds
        state = state_of(app, kinds, late_of_worker, now_s)
        if kinds:
            _group_faults(app, len(rows), faults)
        rows.append(
            (
                state,
                running,
                waiting,
                round(usage, 3),
                round(host, 3),
                round(found / queried, 3) if queried else 0.0,
                late_of_worker,
                tokens,
                int(state == "dead"),
                kinds,
                worker.restarts,
                0 if worker.handoff is None else worker.handoff.in_flight,
            )
        )
    columns = dict(zip(COLUMNS, (list(column) for column in zip(*rows, strict=True)), strict=True))
    totals = Totals(
        sum_counts(first_tokens),
        sum_counts(gaps),
        sum(columns["tokens"]),
        prompts,
        cached,
        sum(columns["running"]),
        sum(columns["waiting"]),
    )
    ports = [server.port for server in servers]
    return Report(columns, ports, totals, list(faults.values()), late)


COLUMNS = (
    *(
        "state",
        "running",
        "waiting",
        "usage",
        "host",
        "hit",
        "late_ms",
        "tokens",
        "dead",
        "faults",
        "restarts",
        "transfers",
    ),
)


def _group_faults(app: App, index: int, grouped: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    """Add the faults of a worker; workers with equal ones share a row."""
    now_s = time.time()
    for row in app.faults.active():
        left_s = row.pop("left_s")
        until = None if left_s is None else round(now_s + left_s)
        key = (*row.items(), until)
        grouped.setdefault(key, {**row, "until": until, "workers": []})["workers"].append(index)


def join_reports(reports: Sequence[Report]) -> Report:
    """Join the reports of several processes, whose workers follow one another."""
    faults: dict[tuple[Any, ...], dict[str, Any]] = {}
    first = 0
    for report in reports:
        for row in report.faults:
            key = tuple((name, value) for name, value in row.items() if name != "workers")
            shared = faults.setdefault(key, {**row, "workers": []})
            shared["workers"] += [first + worker for worker in row["workers"]]
        first += len(report.ports)
    return Report(
        {name: [value for one in reports for value in one.columns[name]] for name in COLUMNS},
        [port for one in reports for port in one.ports],
        Totals.sum([one.totals for one in reports]),
        list(faults.values()),
        {name: max(one.late_ms[name] for one in reports) for name in reports[0].late_ms},
    )


def describe_worker(server: Server, number: int) -> dict[str, Any]:
    """Describe one worker: its requests, its blocks by tier, and its faults."""
    now_ns = server.runtime.clock.now_ns()
    requests = [
        {
            "id": request.name,
            "prompt": request.prompt_tokens,
            "cached": request.cached_tokens,
            "done": request.emitted,
            "of": request.max_tokens,
            "age_ms": round((now_ns - request.arrival_ns) / 1e6),
            "state": "running" if request.admitted_ns >= 0 else "waiting",
        }
        for request in server.worker.live()
    ]
    return {
        "worker": number,
        "port": server.port,
        "model": server.settings.names[0],
        "requests": requests,
        "cache": _describe_cache(server),
        "preemptions": sum(core.preemptions for core in server.worker.cores),
        "restarts": server.worker.restarts,
        "faults": server.app.faults.active(),
    }


def _describe_cache(server: Server) -> list[dict[str, Any]]:
    """Count a worker's blocks by tier: held by requests, cached, free."""
    tiers: dict[str, BlockCounts] = {}
    for core in server.worker.cores:
        below = [one.tier for one in server.settings.tiers.tiers] if core.has_tiers else []
        for name, counts in core.count_blocks(below).items():
            tiers[name] = tiers.get(name, BlockCounts(0, 0, 0)).plus(counts)
    return [
        {"tier": name, "held": counts.active, "cached": counts.cached, "free": counts.free}
        for name, counts in tiers.items()
    ]

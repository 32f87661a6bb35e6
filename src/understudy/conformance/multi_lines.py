"""The host's part of lines of an instance with several connectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.conformance.host_copies import HostCopies

if TYPE_CHECKING:
    from collections import Counter

    from understudy._core import VllmEngine
    from understudy.conformance.handoff_scenario import HostSettings

Line = dict[str, Any]


class HostLines:
    """Moves the bytes of one instance's host, and describes them; content is named by hashes until `name`."""

    def __init__(
        self, engine: VllmEngine, settings: HostSettings, names: list[str], *, host_first: bool
    ) -> None:
        self._engine = engine
        self._names = names
        self._nixl, self._host = (1, 0) if host_first else (0, 1)
        self._copies = HostCopies(settings)
        self._stored: dict[int, list[int]] = {}
        """Hashes by store job, as long as the host knows of it."""
        self._events: list[Line] = []
        """Not yet published by an update."""
        self.found: dict[int, int] = {}
        """Tokens that the last lookup of a request before its first preemption found."""
        self._preempted: set[int] = set()

    def reset(self) -> None:
        """Forget the jobs in flight: the host does."""
        self._stored.clear()

    def describe_schedule(self, line: Line, tick: int) -> tuple[list[int], list[int]]:
        """Add the schedule to the line, and run the worker. Returns the jobs that are done, and the requests loaded."""
        names = self._names
        asked = self._engine.take_multi_line()
        for r, local, result, _ in asked["lookups"]:
            if result is not None and r not in self._preempted:
                self.found[r] = local + result
        self._preempted.update(self._engine.preempted)
        line["lookups"] = [
            [names[r], local, result, answers] for r, local, result, answers in asked["lookups"]
        ]
        line["told"] = [[names[r], told] for r, told in asked["told"]]
        logged: dict[str, Any] = self._engine.take_offload_line()
        line["loads"] = [
            {**self._job(job), "table": [block + 1 for block in job["table"]]} for job in logged["loads"]
        ]
        line["stores"] = [self._job(job) for job in logged["stores"]]
        line["store_failed"] = [names[r] for r in logged["refused"]]
        line["flush"] = logged["flush"]
        line["evicted"] = [key for keys in logged["evicted"] for key in keys]
        # vLLM lists new requests, then running ones, then resumed ones.
        blocks = sorted(logged["blocks"], key=lambda row: (not row[1], row[2]))
        line["blocks"] = {names[r]: [block + 1 for block in slots] for r, _, _, slots in blocks}
        for job in logged["stores"]:
            self._stored[job["job"]] = job["hashes"]
        self._events += [{"type": "removed", "h": keys} for keys in logged["evicted"]]
        line["posted"], done, loaded = self._copies.run(logged, tick)
        return done, loaded

    def describe_update(self, line: Line) -> None:
        """Add what an update has published; the line has its jobs."""
        for job in line.get("jobs_done", ()):
            self._events += [{"type": "stored", "h": [key]} for key in self._stored.pop(job, [])]
        line["host_events"], self._events = self._events, []

    def describe_state(self, line: Line) -> None:
        """Add the host's state."""
        state: dict[str, Any] = self._engine.take_offload_line()
        line["host_chunks"] = state["resident"]
        line["host_ready"] = state["ready"]
        line["host_lru"] = state["oldest"]

    def count(self, line: Line, totals: Counter[str]) -> None:
        """Add a line to the totals."""
        side = line["i"]
        for key in ("loads", "stores"):
            totals[f"{key}_{side}"] += len(line.get(key, ()))
            totals[f"{key[:-1]}_chunks_{side}"] += sum(len(job["chunks"]) for job in line.get(key, ()))
        totals[f"store_failed_{side}"] += len(line.get("store_failed", ()))
        totals[f"evicted_{side}"] += len(line.get("evicted", ()))
        totals[f"flushed_{side}"] += len(line.get("flush", ()))
        for _, _, result, answers in line.get("lookups", ()):
            host = answers[self._host] if self._host < len(answers) else 0
            pull = answers[self._nixl] if self._nixl < len(answers) else 0
            totals[f"lookup_deferred_{side}"] += result is None
            totals[f"lookup_deferred_pull_{side}"] += result is None and bool(pull)
            totals[f"lookup_both_hit_{side}"] += bool(host and pull)
            totals[f"lookup_host_hit_{side}"] += bool(host and not pull)
            totals[f"lookup_pull_no_host_{side}"] += bool(pull and host == 0)

    def _job(self, job: Line) -> Line:
        # vLLM counts its reserved block 0.
        return {
            "job": job["job"],
            "req": self._names[job["request"]],
            "chunks": job["chunks"],
            "h": job["hashes"],
            "gpu": [block + 1 for block in job["device"]],
            "host": job["host"],
        }


def name_content(lines: list[Line], numbers: dict[int, int]) -> None:
    """Replace hashes by their numbers in the device's events, or by negative ones if no event has them."""
    known = dict(numbers)
    unnamed = iter(range(-1, -(1 << 62), -1))

    def number(keys: list[int]) -> list[int]:
        return [known[key] if key in known else known.setdefault(key, next(unnamed)) for key in keys]

    for line in lines:
        for described in (*line.get("loads", ()), *line.get("stores", ()), *line.get("host_events", ())):
            described["h"] = number(described["h"])
        for key in ("evicted", "host_lru"):
            if line.get(key):
                line[key] = number(line[key])

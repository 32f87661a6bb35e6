"""Scaling by a timetable."""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from understudy.scaling.metrics import Decision, TickMetrics


class Planned(NamedTuple):
    """Numbers of workers from a time on; None: as before."""

    at_s: float
    decode: int | None
    prefill: int | None = None


class ScheduleScaler:
    """Set the numbers of workers at fixed times."""

    def __init__(self, plan: Sequence[Planned]) -> None:
        """Keep the plan. ConfigError if it is empty or not in the order of time."""
        if not plan:
            raise ConfigError("schedule: has no line; give at least one time and number of workers")
        if any(later.at_s <= earlier.at_s for earlier, later in pairwise(plan)) or plan[0].at_s < 0:
            raise ConfigError("schedule: times must start at 0 or later and increase")
        self._plan = list(plan)

    def initial_tick_ms(self) -> float:
        """Return the first time of the plan in ms."""
        return self._plan[0].at_s * 1000.0

    def on_tick(self, metrics: TickMetrics) -> Decision:
        """Return the numbers of this time."""
        after = bisect_right([line.at_s for line in self._plan], metrics["now_ms"] / 1000.0)
        line = self._plan[max(0, after - 1)]
        return {
            "target_prefill": line.prefill,
            "target_decode": line.decode,
            "next_tick_ms": self._plan[after].at_s * 1000.0 if after < len(self._plan) else None,
        }


def read_schedule(path: Path) -> ScheduleScaler:
    """Read JSON lines `{"at_s": 60, "workers": 4}`, or with `prefill` and `decode`. ConfigError names file and line."""
    plan = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"schedule: {path}: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            plan.append(_read_line(line, f"schedule: {path}:{number}"))
    return ScheduleScaler(plan)


def _read_line(line: str, where: str) -> Planned:
    try:
        given: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(given, dict) or "at_s" not in given:
        raise ConfigError(f'{where}: must be an object with at_s, such as {{"at_s": 60, "workers": 4}}')
    unknown = set(given) - {"at_s", "workers", "prefill", "decode"}
    if unknown or ("workers" in given and "decode" in given):
        raise ConfigError(f"{where}: give at_s and workers, or at_s with prefill and decode")
    at_s = given["at_s"]
    if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0 <= at_s < 1e9:
        raise ConfigError(f"{where}: at_s: {at_s!r} is not a time in seconds")
    for name in ("workers", "prefill", "decode"):
        count = given.get(name, 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ConfigError(f"{where}: {name}: {count!r} is not a number of workers")
    return Planned(float(at_s), given.get("workers", given.get("decode")), given.get("prefill"))

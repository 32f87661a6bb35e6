"""Random fault plans: faults at random times, by seed."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.run.faults import EVENT_KINDS, KINDS, Fault, Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

MEAN_DURATION_S = 15.0
KINDS_ANYWHERE: tuple[Kind, ...] = ("kill", "slow")
"""Faults that every fleet can have."""


def draw_faults(
    seed: int,
    *,
    per_hour: float,
    end_s: float,
    workers: int,
    kinds: Sequence[Kind] = KINDS_ANYWHERE,
    mean_duration_s: float = MEAN_DURATION_S,
) -> tuple[Fault, ...]:
    """Draw faults up to `end_s`: as many per hour on average, each of one worker, equal for equal arguments.

    All end: durations are exponential, at most eight times the mean. ConfigError names an argument out of range.
    """
    if not 0 < per_hour < 1e9:
        raise ConfigError(f"chaos_rate: {per_hour:g} must be above 0, in faults per hour")
    if not end_s >= 0:
        raise ConfigError(f"chaos: {end_s} is not a time")
    if not kinds:
        raise ConfigError(f"chaos_kinds: give at least one of {', '.join(KINDS)}")
    random = Random(seed)
    faults = []
    at_s = random.expovariate(per_hour / 3600)
    while at_s < end_s:
        faults.append(_draw(random, at_s, random.choice(kinds), workers, mean_duration_s))
        at_s += random.expovariate(per_hour / 3600)
    return tuple(faults)


def _draw(random: Random, at_s: float, kind: Kind, workers: int, mean_s: float) -> Fault:
    lasts_s = min(max(random.expovariate(1 / mean_s), mean_s / 100), 8 * mean_s)
    given: dict[str, Any] = {"worker": random.randrange(workers)}
    if kind in ("slow", "slow_link"):
        given["factor"] = round(2 ** random.uniform(0.5, 5), 3)
    if kind in ("lose_events", "fail_loads"):
        given["rate"] = round(random.uniform(0.1, 1), 3)
    if kind == "late_events":
        given["delay_ms"] = round(random.uniform(1, 1000 * mean_s), 3)
    return Fault(kind=kind, at_s=round(at_s, 6), duration_s=round(lasts_s, 6), **given)


def list_kinds(
    *, reads_events: bool, has_host_tier: bool, has_limited_host_link: bool, loses_requests: bool
) -> tuple[Kind, ...]:
    """List the faults that a fleet can have."""
    kinds: list[Kind] = ["kill", "slow"] if loses_requests else ["slow"]
    if reads_events:
        kinds += EVENT_KINDS
    if has_host_tier:
        kinds.append("fail_loads")
    if has_limited_host_link:
        kinds.append("slow_link")
    return tuple(kinds)

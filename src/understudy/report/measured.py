"""Engines that are compared by step times which were measured on only one of them."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Any

from understudy.engines.kinds.registry import kind_of_saved, list_kinds

if TYPE_CHECKING:
    from collections.abc import Iterable

_OF_ONE_ENGINE = ("calibrated", "recorded steps", "a planner's profile")
"""Sources that were measured with one engine: two engines cannot share one."""
REMEDY = (
    "calibrate each engine with benchmarks of its own (understudy calibrate), or accept it with --accept-unmeasured "
    "(in Python accept_unmeasured=True)"
)


def find_unmeasured(runs: Iterable[Iterable[tuple[str, str]]]) -> str | None:
    """Return the problem of comparing the engines of these runs; None if there is none.

    Each engine of a run is the name of its kind, and the source of its times. Runs of the same kinds are comparable.
    """
    fleets = [list(run) for run in runs]
    if len({frozenset(name for name, _ in fleet) for fleet in fleets}) < 2:
        return None
    sources: dict[str, set[str]] = {}
    for name, source in (engine for fleet in fleets for engine in fleet):
        sources.setdefault(name, set()).add(source)
    kinds = [kind for kind in list_kinds() if kind.name in sources]
    for kind in kinds:
        for other in list_kinds():
            own = f"measured with {kind.title}"
            borrowed = [
                one
                for one in sorted(sources[kind.name])
                if one.startswith(other.measured_sources) and own not in one
            ]
            if borrowed and other is not kind:
                return f"the times of {kind.title} were measured with {other.title} ({borrowed[0]})"
    for kind in kinds:
        if found := [one for one in sorted(sources[kind.name]) if "never measured" in one]:
            return f"the times of {kind.title} were never measured there ({found[0]})"
    for kind, other in combinations(kinds, 2):
        both = sources[kind.name] & sources[other.name]
        if shared := [one for one in sorted(both) if one.startswith(_OF_ONE_ENGINE)]:
            return (
                f"{kind.title} and {other.title} run on times that were measured on one of them ({shared[0]})"
            )
    return None


def list_engines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """List the engines of a saved report: the name of the kind of each, and the source of its times."""
    run = report["run"]
    source = str((run.get("times") or {}).get("from", ""))
    pools = run.get("pools") or [run]
    return [(kind_of_saved(pool.get("engine") or {}).name, source) for pool in pools]

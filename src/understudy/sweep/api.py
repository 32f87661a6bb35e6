"""`understudy.sweep`: replay every combination of settings and find the cheapest fleet that meets a goal."""

from __future__ import annotations

import os
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.checks import share, whole_number
from understudy.defaults import GOAL
from understudy.errors import ConfigError, InvalidArgument
from understudy.report.goodput import Slo
from understudy.run.pools import make_pools
from understudy.run.settings import ReplaySettings
from understudy.sweep.candidate import Candidate
from understudy.sweep.checkpoints import refuse_unspoken
from understudy.sweep.local import InProcess, Processes
from understudy.sweep.prices import Prices
from understudy.sweep.result import Sweep
from understudy.sweep.search import search_by_bisection, search_grid
from understudy.sweep.space import Dimension, Space
from understudy.sweep.store import Store
from understudy.sweep.trials import Trials
from understudy.workload import Workload, read_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from understudy.sweep.space import Point

_SHORT = {"gpu": "gpu.name", "tensor_parallel_size": "gpu.tensor_parallel_size"}
_WHOLE = ("workers", "routing", "users", "seed", "model", "kv_dtype")
"""Settings of a replay; every other name without a dot is one of the engine."""


def sweep(
    workload: Workload | str | os.PathLike[str],
    vary: Mapping[str, Sequence[Any]],
    *,
    slo: Slo | Mapping[str, float],
    model: str | None = None,
    gpu: str | None = None,
    settings: Mapping[str, Any] | None = None,
    goal: float = GOAL,
    goal_window_s: float | None = None,
    prices: Mapping[str, float] | None = None,
    search: str = "grid",
    store: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Sweep:
    """Replay every combination of settings and find the cheapest fleet that meets the goal.

    Parameters:
        workload: a workload, or the path of a trace in any known format.
        vary: values of each setting by name: `workers`, `routing`, `users`, `gpu`, `tensor_parallel_size`, a setting of
            the engine, or a path with dots as for `--set`.
        slo: objectives, as `Slo` or by name, such as `{"ttft_ms": 2000, "itl_ms": 50}`.
        model: model of all fleets; needed with a GPU.
        gpu: GPU of all fleets.
        settings: other settings that all fleets share, by the same names as in `vary`.
        goal: share of requests that must meet all objectives.
        goal_window_s: length of the windows in each of which the goal must hold too.
        prices: $ per hour of a GPU by name; None: GPUs are counted.
        search: `grid`, or `bisect` for the fewest workers that meet the goal.
        store: file of finished candidates; the same sweep again continues.
        jobs: processes; default: all cores.
        progress: called with the numbers of finished and of expected candidates.

    Errors: ConfigError names a wrong argument, and the first reason if every combination is invalid.

    Example:
        found = us.sweep("trace.jsonl", {"workers": [1, 2]}, slo={"ttft_ms": 2000}, jobs=1)
        print(found.answers[0].best)
    """
    started = time.perf_counter()
    share("goal", goal)
    if search not in ("grid", "bisect"):
        raise ConfigError(f"search must be grid or bisect, got {search!r}")
    name = "workload" if isinstance(workload, Workload) else Path(workload).name
    rows = workload if isinstance(workload, Workload) else read_trace(workload)
    if not len(rows):
        raise InvalidArgument(f"{name} contains no requests; give another trace")
    limits = slo if isinstance(slo, Slo) else Slo(**slo)
    space = _read_space(vary)
    shared = {**dict(settings or {}), **({} if model is None else {"model": model})}
    shared |= {} if gpu is None else {"gpu": gpu}
    if both := sorted(set(map(_path, shared)) & set(map(_path, vary))):
        raise ConfigError(f"vary: {both[0]} is given for all fleets too; give one")
    charged = Prices.parse([f"{each}={price}" for each, price in (prices or {}).items()])

    def build(point: Point) -> Candidate:
        varied = {each: values[at] for (each, values), at in zip(vary.items(), point, strict=True)}
        read = ReplaySettings.read(None, _nest({**shared, **varied}), [])
        candidate = Candidate(
            flags=space.values(point),
            settings=read,
            slo=limits,
            model=read.model,
            kv_dtype=read.kv_dtype,
            goal_window_s=goal_window_s,
        )
        charged.check(candidate)
        refuse_unspoken(candidate)
        if not read.pools and read.disaggregation is None:
            make_pools((), read.engine, read.workers, read.tiers)
        return candidate

    count = len(os.sched_getaffinity(0)) if jobs is None else whole_number("jobs", jobs, 1, 4096)
    with (
        Store(None if store is None else Path(store)) as kept,
        closing(InProcess(rows) if count == 1 else Processes(rows, count)) as runner,
    ):
        trials = Trials(space, build, charged.cost, rows, runner, kept, progress)
        if search == "grid":
            search_grid(trials)
        else:
            search_by_bisection(trials, goal)
    if not trials.whole:
        reasons = [*trials.invalid.values(), *trials.failed.values()]
        raise ConfigError(f"vary: every combination is invalid; the first: {reasons[0]}")
    return Sweep.build(
        trials,
        goal=goal,
        goal_window_s=goal_window_s,
        workload=name,
        workload_digest=rows.digest,
        slo=limits,
        search=search,
        has_prices=charged.are_given,
        wall_s=time.perf_counter() - started,
        notes=rows.notes,
    )


def _read_space(vary: Mapping[str, Sequence[Any]]) -> Space:
    if not vary:
        raise ConfigError(
            "vary: nothing varies; give settings and their values, such as {'workers': [1, 2, 4]}"
        )
    dimensions = []
    for name, values in vary.items():
        if isinstance(values, str) or not len(values):
            raise ConfigError(f"vary: {name} needs a list of values, got {values!r}")
        dimensions.append(Dimension(name.replace("_", "-"), tuple(map(str, values))))
    return Space(tuple(dimensions))


def _path(name: str) -> str:
    """Return the path of a setting by its name."""
    if "." in name:
        return name
    return _SHORT.get(name, name if name in _WHOLE else f"engine.{name}")


def _nest(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name, nested as in a settings file."""
    nested: dict[str, Any] = {}
    for name, value in given.items():
        *outer, last = _path(name).split(".")
        place = nested
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = value
    return nested

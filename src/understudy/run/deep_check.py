"""`check="deep"`: replay a run step by step and compare it with the run that fast-forwarded."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING

import numpy as np

from understudy.errors import ConfigError, InvariantViolated
from understudy.router.kv import KvRouter, KvRouting
from understudy.run.digest import digests
from understudy.run.schema import list_columns
from understudy.run.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy._core import Checkpoints
    from understudy.engines.timing import TimingModel
    from understudy.run.fleet_plan import FleetPlan
    from understudy.run.kv_log import KvLog
    from understudy.run.pools import WorkerPool
    from understudy.run.routing_choice import RoutingChoice


def copy_inputs(
    fleet: FleetPlan, routing: RoutingChoice, timing: TimingModel | None
) -> tuple[FleetPlan, RoutingChoice, TimingModel | None]:
    """Copy user-defined objects before the first run changes them. ConfigError where one cannot be copied."""
    try:
        if not isinstance(routing, str | KvRouting | KvRouter):  # these reset their state when a run begins
            routing = deepcopy(routing)
        return deepcopy(fleet), routing, deepcopy(timing)
    except Exception as error:  # user-defined code may raise anything
        raise ConfigError(
            f"check='deep' runs the workload twice and copies user-defined objects, but copy.deepcopy fails: {error}; "
            "give the object a __deepcopy__, or use check=True"
        ) from error


def require_equal(fast: Timeline, stepped: Timeline, kv: tuple[KvLog | None, KvLog | None]) -> None:
    """Raise InvariantViolated at the first column and row where a run differs from its replay by steps."""
    for declared in list_columns(Timeline):
        for one, other in zip(declared.arrays(fast), declared.arrays(stepped), strict=True):
            if len(one) != len(other):
                raise InvariantViolated(
                    f"{declared.name}: {len(one)} rows with fast-forward, {len(other)} step by step"
                )
            if len(rows := np.flatnonzero(one != other)):
                at = rows[0]
                raise InvariantViolated(
                    f"{declared.name}, row {at}: {one[at]} with fast-forward, {other[at]} step by step"
                )
    parts, others = digests(fast, kv[0])["digests"], digests(stepped, kv[1])["digests"]
    if differ := [name for name, value in parts.items() if value != others[name]]:
        raise InvariantViolated(f"{', '.join(differ)} differ between fast-forward and stepping")


def describe_comparison(
    checkpoints: Checkpoints, pools: Sequence[WorkerPool], timing: TimingModel | None, *, ranks: bool
) -> str:
    """Say how many fast-forwards were compared, or why there were none."""
    if checkpoints.recorded:
        return f"check deep: {checkpoints.compared:,} fast-forwards equal the same steps one by one"
    reasons = [f"timing {type(timing).__qualname__} is user-defined"] if timing is not None else []
    reasons += [
        f"eviction_policy {pool.engine.describe()['eviction_policy']} is user-defined"
        for pool in pools
        if pool.engine.has_user_policy
    ]
    if ranks:
        reasons.append("ranks step together")
    why = f" ({', '.join(dict.fromkeys(reasons))})" if reasons else ""
    return f"check deep: no step was fast-forwarded{why}; each was checked when it ended"

"""Read the pools of a settings file."""

from __future__ import annotations

from typing import Any

import msgspec

from understudy.engines.kinds.registry import read_engine
from understudy.errors import ConfigError
from understudy.run.layers import TIER_FIELDS, reject_unused_kv_size
from understudy.run.pools import WorkerPool, check_pools
from understudy.run.ranks import refuse_ranks_of_pools
from understudy.tiers.settings import TiersConfig

_POOL_FIELDS = ("name", "role", "workers", "engine", *TIER_FIELDS)


def take_route_rejected(merged: dict[str, Any]) -> dict[str, Any]:
    """Remove `route_rejected` from a replay's settings, for the settings of its engines."""
    return {name: merged.pop(name) for name in ("route_rejected",) if name in merged}


def read_pools(listed: object, rejected: dict[str, Any]) -> tuple[WorkerPool, ...]:
    """Read a list of pools; `rejected` are settings of all their engines. ConfigError names the wrong field."""
    if not isinstance(listed, list) or not listed or not all(isinstance(pool, dict) for pool in listed):
        raise ConfigError(f"pools must be a list of pools, each with settings by name, got {listed!r}")
    pools = []
    for number, settings in enumerate(listed):
        name = settings.get("name", f"pool {number}")
        for field in settings:
            if field not in _POOL_FIELDS:
                raise ConfigError(
                    f"pools[{number}].{field} is not known; known are {', '.join(_POOL_FIELDS)}"
                )
        below = {field: settings[field] for field in TIER_FIELDS if field in settings}
        given = settings.get("engine") or {}
        engine = read_engine({**given, **rejected})
        tiers = TiersConfig.from_dict(below) if below else None
        pool = WorkerPool(
            name=name,
            role=settings.get("role", "both"),
            workers=settings.get("workers", 1),
            engine=engine,
            tiers=tiers,
        )
        if not pool.resolve_tiers().tiers:
            reject_unused_kv_size(
                pool.resolve_tiers(), given, removed_on_purpose="tiers" in settings, or_gpu=False
            )
            pool = msgspec.structs.replace(pool, tiers=None if tiers is None else tiers.drop_unused_kv_size())
        pools.append(pool)
    check_pools(pools)
    refuse_ranks_of_pools(pools)
    return tuple(pools)

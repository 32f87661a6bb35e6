"""Pools of a fleet: groups of workers with equal settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from understudy.checks import whole_number
from understudy.engines.engine_config import EngineConfig
from understudy.engines.kinds.registry import DEFAULT_ENGINE
from understudy.errors import ConfigError
from understudy.tiers.settings import KV_SIZE_FIELDS, TiersConfig

if TYPE_CHECKING:
    from collections.abc import Sequence


class WorkerPool(msgspec.Struct, frozen=True, kw_only=True):
    """`workers` workers with equal engine settings, and tiers that only they share.

    The workers of a fleet are numbered across its pools. All pools of a fleet have the same block size, which routers
    and events use. ConfigError names a wrong field.
    """

    engine: EngineConfig = DEFAULT_ENGINE
    workers: int = 1
    tiers: TiersConfig | None = None
    """Tiers below the device (default: those in the engine's settings)."""
    role: Literal["both", "prefill", "decode"] = "both"
    """Stage of requests that it serves: prefill and decode need `Disaggregation`."""
    name: str = "workers"
    """Prefix of the names of its tiers and links where a fleet has several pools; stripped of blanks."""

    def __post_init__(self) -> None:
        if not isinstance(self.engine, EngineConfig):
            raise ConfigError(f"engine must be an EngineConfig, such as VllmConfig, got {self.engine!r}")
        if not isinstance(self.tiers, TiersConfig | None):
            raise ConfigError(
                f"tiers must be a TiersConfig (TiersConfig.from_dict reads settings by name), got {self.tiers!r}"
            )
        if self.role not in ("both", "prefill", "decode"):
            raise ConfigError(f"role must be prefill, decode or both, got {self.role!r}")
        if not isinstance(self.name, str):
            raise ConfigError(f"name must be text, got {self.name!r}")
        msgspec.structs.force_setattr(self, "name", self.name.strip())
        msgspec.structs.force_setattr(self, "workers", whole_number("workers", self.workers, 1))

    def resolve_tiers(self) -> TiersConfig:
        """Return the given tiers, or those of the engine's settings; either may give KV bytes per token."""
        if self.tiers is None or self.tiers == TiersConfig():
            return self.engine.tiers
        if self.engine.tiers.tiers:
            raise ConfigError(
                "tiers are given twice; leave them out of the engine's settings, or of the pool"
            )
        kv_bytes = self.engine.tiers.kv_bytes_per_token
        if kv_bytes is None:
            return self.tiers
        if self.tiers.model is not None or self.tiers.kv_bytes_per_token not in (None, kv_bytes):
            raise ConfigError(
                "kv_bytes_per_token is given twice; leave it out of the engine's settings, or of the tiers"
            )
        return msgspec.structs.replace(self.tiers, kv_bytes_per_token=kv_bytes)

    def reject_unused_kv_size(self) -> None:
        """Raise ConfigError for a KV size (bytes per token, model) without tiers, where it is not used."""
        if self.tiers is None or self.resolve_tiers().tiers:
            return
        for name in KV_SIZE_FIELDS:
            if getattr(self.tiers, name) is not None:
                raise ConfigError(
                    f"tiers: {name} gives the KV bytes per token in a tier, and there is none; add one "
                    "(TierSettings(tier='g2', blocks=4096)), or leave it out"
                )


def check_pools(pools: Sequence[WorkerPool]) -> None:
    """Raise ConfigError if the pools do not form a fleet."""
    if not isinstance(pools, list | tuple):
        raise ConfigError(f"pools must be a list of WorkerPools, got {pools!r}")
    for pool in pools:
        if not isinstance(pool, WorkerPool):
            raise ConfigError(f"pools must be WorkerPools, got {pool!r}")
    sizes = {pool.engine.block_size for pool in pools}
    if len(sizes) > 1:
        listed = ", ".join(f"{pool.engine.block_size} ({pool.name})" for pool in pools)
        raise ConfigError(f"pools of one fleet need one block_size, got {listed}")
    if len({pool.engine.orders_by_name for pool in pools}) > 1:
        raise ConfigError(
            "pools of one fleet need one scheduling_policy, because it determines request names"
        )
    if len({pool.engine.mocker.route_rejected for pool in pools}) > 1:
        raise ConfigError("pools of one fleet need one route_rejected, because one router serves them all")


def name_pools(pools: Sequence[WorkerPool]) -> list[str]:
    """Return distinct names: the pools' own, or numbers where two are equal. A single pool's name is empty."""
    if len(pools) == 1:
        return [""]
    given = [pool.name for pool in pools]
    numbered = [f"pool {number}" for number in range(len(pools))]
    return [
        name if given.count(name) == 1 and name not in {*numbered} - {number} else number
        for name, number in zip(given, numbered, strict=True)
    ]


def make_pools(
    pools: Sequence[WorkerPool], engine: EngineConfig | None, workers: int, tiers: TiersConfig | None
) -> Sequence[WorkerPool]:
    """Return the given pools, or one pool of equal workers; ConfigError if they do not form a fleet."""
    if pools and (engine is not None or workers != 1 or tiers is not None):
        raise ConfigError(
            "pools have their own engines, workers and tiers; leave engine, workers and tiers out"
        )
    pools = pools or [
        WorkerPool(engine=DEFAULT_ENGINE if engine is None else engine, workers=workers, tiers=tiers)
    ]
    check_pools(pools)
    for pool in pools:
        pool.reject_unused_kv_size()
    return pools

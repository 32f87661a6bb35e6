"""Pools of a fleet: workers that are alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from understudy.checks import whole_number
from understudy.engines.config import VllmConfig
from understudy.errors import ConfigError
from understudy.tiers.settings import KV_SIZE_FIELDS, TiersConfig

if TYPE_CHECKING:
    from collections.abc import Sequence


class WorkerPool(msgspec.Struct, frozen=True, kw_only=True):
    """`workers` workers with one engine's settings, and tiers that they share with nobody else.

    The workers of a fleet are numbered through its pools. Pools of one fleet agree on the size of a block, which
    routers and events go by. ConfigError names what is wrong.
    """

    engine: VllmConfig = VllmConfig()
    workers: int = 1
    tiers: TiersConfig | None = None
    """Below the device; unless given, those that came with the engine's settings."""
    name: str = "workers"
    """What its tiers and links are called by where a fleet has several pools; blanks around it do not count."""

    def __post_init__(self) -> None:
        if not isinstance(self.engine, VllmConfig):
            raise ConfigError(f"engine must be a VllmConfig, got {self.engine!r}")
        if not isinstance(self.tiers, TiersConfig | None):
            raise ConfigError(
                f"tiers must be a TiersConfig (TiersConfig.from_dict reads settings by name), got {self.tiers!r}"
            )
        if not isinstance(self.name, str):
            raise ConfigError(f"name must be text, got {self.name!r}")
        msgspec.structs.force_setattr(self, "name", self.name.strip())
        msgspec.structs.force_setattr(self, "workers", whole_number("workers", self.workers, 1))

    def below(self) -> TiersConfig:
        """The tiers that were given, or those of the engine's settings. What a token weighs may stand with either."""
        if self.tiers is None or self.tiers == TiersConfig():
            return self.engine.tiers
        if self.engine.tiers.tiers:
            raise ConfigError("tiers are given twice: in the engine's settings, and beside it")
        weight = self.engine.tiers.kv_bytes_per_token
        if weight is None:
            return self.tiers
        if self.tiers.model is not None or self.tiers.kv_bytes_per_token not in (None, weight):
            raise ConfigError(
                "what a token weighs is given twice: in the engine's settings, and beside the tiers"
            )
        return msgspec.structs.replace(self.tiers, kv_bytes_per_token=weight)

    def refuse_idle_weight(self) -> None:
        """Refuse what a token weighs beside no tier, where nobody asks for it. ConfigError names the field."""
        if self.tiers is None or self.below().tiers:
            return
        for name in KV_SIZE_FIELDS:
            if getattr(self.tiers, name) is not None:
                raise ConfigError(
                    f"tiers: {name} says what a token weighs in a tier, and there is none; add one "
                    "(TierSettings(tier='g2', blocks=4096)), or leave it out"
                )


def check_pools(pools: Sequence[WorkerPool]) -> None:
    """Whether they make a fleet."""
    if not isinstance(pools, list | tuple):
        raise ConfigError(f"pools must be a list of WorkerPools, got {pools!r}")
    for pool in pools:
        if not isinstance(pool, WorkerPool):
            raise ConfigError(f"pools must be WorkerPools, got {pool!r}")
    sizes = {pool.engine.block_size for pool in pools}
    if len(sizes) > 1:
        listed = ", ".join(f"{pool.engine.block_size} ({pool.name})" for pool in pools)
        raise ConfigError(f"pools of one fleet need one block_size, got {listed}")
    if len({pool.engine.scheduling_policy for pool in pools}) > 1:
        raise ConfigError("pools of one fleet need one scheduling_policy: it says how requests are named")


def names_of(pools: Sequence[WorkerPool]) -> list[str]:
    """What tells the pools of a fleet apart: their names, or their numbers where two have the same. One has none."""
    if len(pools) == 1:
        return [""]
    given = [pool.name for pool in pools]
    numbered = [f"pool {number}" for number in range(len(pools))]
    return [
        name if given.count(name) == 1 and name not in {*numbered} - {number} else number
        for name, number in zip(given, numbered, strict=True)
    ]


def pools_of(
    pools: Sequence[WorkerPool], engine: VllmConfig | None, workers: int, tiers: TiersConfig | None
) -> Sequence[WorkerPool]:
    """The pools that were given, or one of workers that are all alike; ConfigError where they make no fleet."""
    if pools and (engine is not None or workers != 1 or tiers is not None):
        raise ConfigError(
            "pools have engines, workers and tiers of their own: leave engine, workers and tiers out"
        )
    pools = pools or [
        WorkerPool(engine=VllmConfig() if engine is None else engine, workers=workers, tiers=tiers)
    ]
    check_pools(pools)
    for pool in pools:
        pool.refuse_idle_weight()
    return pools

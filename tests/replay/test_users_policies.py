"""Policies of a user's that know of all workers: they are told what happens in the order in which it happens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from replay.building import single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.kv import EvictionPolicy
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import OffloadPolicy, TiersConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

TOLD: list[int] = []
"""Lineage hashes, as the policies of all workers heard of them."""


class Watching(OffloadPolicy):
    """Wants everything."""

    def select(self, lineages: list[int], _reuse: Any) -> Sequence[bool]:
        TOLD.extend(lineages)
        return [True] * len(lineages)


class Oldest(EvictionPolicy):
    """First freed, first evicted."""

    def __init__(self) -> None:
        self._order: dict[int, None] = {}

    def on_freed(self, blocks: Any, lineage_hashes: list[int | None]) -> None:
        TOLD.extend(lineage for lineage in lineage_hashes if lineage is not None)
        self._order.update(dict.fromkeys(blocks.tolist()))

    def on_taken(self, blocks: Any) -> None:
        for block in blocks.tolist():
            self._order.pop(block, None)

    def select(self, count: int) -> Sequence[int]:
        return list(self._order)[:count]


def order_told(where: str, workers: int) -> list[int]:
    """Blocks in the order in which policies first heard of them; requests come when those before have ended."""
    workload = single_turns([64] * 20, output_tokens=3, arrival_ms=[300 * i for i in range(20)])
    host: dict[str, Any] = {"tier": "g2", "blocks": 16}
    offload = {"filter": Watching} if where == "filter" else {}
    if where == "host":
        host["eviction"] = Oldest
    engine = VllmConfig(
        block_size=16, num_gpu_blocks=16, eviction_policy=Oldest if where == "device" else None
    )
    tiers = TiersConfig.from_dict({"tiers": [host], "kv_bytes_per_token": 1024, "offload": offload})
    TOLD.clear()
    run = run_offline(RunPlan(workload, engine, workers=workers, tiers=None if where == "device" else tiers))
    assert run.timeline.completed.all()
    return list(dict.fromkeys(TOLD))


@pytest.mark.parametrize("where", ["filter", "host", "device"])
def test_what_policies_of_several_workers_hear_is_in_the_order_of_time(where: str) -> None:
    alone = order_told(where, 1)
    together = order_told(where, 2)  # of the last requests nobody hears: nobody needs room after them
    assert len(together) > 17 * 4
    assert together == alone[: len(together)]

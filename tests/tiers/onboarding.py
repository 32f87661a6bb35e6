"""Workers whose blocks are in the tiers below, for tests of loads."""

from __future__ import annotations

from tiers.building import MS, Worker, tiers, way
from understudy import _core

G1, G2, G3, G4 = (int(tier) for tier in (_core.Tier.G1, _core.Tier.G2, _core.Tier.G3, _core.Tier.G4))
UNLIMITED = 1e6


def on_host(blocks: int, num_gpu_blocks: int = 8, **settings: object) -> Worker:
    """A worker whose host has `blocks` blocks of chain 1; the device is full of others that the host has too."""
    config = tiers(write_through=True, **settings)  # type: ignore[arg-type]
    worker = Worker(num_gpu_blocks, config, step_ms=0.0)
    worker.cache(1, blocks)
    worker.cache(2, num_gpu_blocks)
    worker.events()
    assert worker.answers(1, blocks) == [("hit", G2)] * blocks
    return worker


def after(worker: Worker, ms: float) -> float:
    """A time that long after the worker's own, in ms."""
    return (worker.now_ns + ms * MS) / MS


def shared_tier() -> _core.SharedTierConfig:
    return _core.SharedTierConfig(num_blocks=100, worker=way(1.0), backend=way(UNLIMITED))

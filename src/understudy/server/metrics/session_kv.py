"""Metrics of the KV of sessions between their requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy._core import VllmEngine
from understudy.run.session_kv import describe_totals

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.clock import Clock
    from understudy.server.core import EngineCore
    from understudy.server.metrics.families import Registry

_NAMES = (
    *("holds", "yielded_holds", "held_blocks", "peak_held_blocks", "held_block_s", "drops", "dropped_blocks"),
    *("offloads", "offloaded_blocks", "prefetches", "prefetched_blocks"),
)


def add_session_kv(registry: Registry, core: EngineCore, clock: Clock, forgotten: Callable[[], int]) -> None:
    """Add what an engine did for sleeping sessions, and how many were forgotten."""

    def read(name: str) -> float:
        if not isinstance(core.engine, VllmEngine):
            return 0.0
        return float(describe_totals(core.engine.prefix_totals(clock.now_ns()))[name])

    for name in _NAMES:
        registry.gauge(
            "understudy:session_kv",
            "What was done for the KV of sleeping sessions, since the engine's start.",
            lambda name=name: read(name),  # type: ignore[misc]
            what=name,
        )
    registry.gauge(
        "understudy:session_kv_forgotten",
        "Sessions that were forgotten because there were too many.",
        lambda: float(forgotten()),
    )

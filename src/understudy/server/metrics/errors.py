"""Counter of logged internal failures that stopped no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.server.core import EngineCore
    from understudy.server.metrics.families import Counter, Registry


def add_errors(registry: Registry, cores: Sequence[EngineCore]) -> None:
    """Add a counter per engine."""
    for rank, core in enumerate(cores):
        counter = registry.counter(
            "understudy:errors",
            "What failed around the engine and did not stop it: orders, events, answers. The log says what.",
            engine=str(rank),
        )

        def refresh(core: EngineCore = core, counter: Counter = counter) -> None:
            counter.value = float(core.errors)

        registry.before_page(refresh)

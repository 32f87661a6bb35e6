"""Interface of scalers, built in or user-defined."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from understudy.scaling.metrics import Decision, TickMetrics


class Scaler(Protocol):
    """Decide how many workers of each role a fleet should have.

    The fleet asks for the time of the first tick, and calls `on_tick` at that time and at each `next_tick_ms`. Targets
    are absolute; a fleet that is still starting workers calls the scaler all the same. An exception ends the run.
    """

    def initial_tick_ms(self) -> float:
        """Return the time of the first tick, in ms from the start of the run."""
        ...

    def on_tick(self, metrics: TickMetrics) -> Decision:
        """Return the wanted numbers of workers and the time of the next tick."""
        ...

"""A scaler that orders given numbers of workers at given times."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.scaling.metrics import Decision, TickMetrics


class Steps:
    """Order `(at_ms, prefill, decode)` in turn, and remember what was measured."""

    def __init__(self, steps: Sequence[tuple[float, int | None, int | None]]) -> None:
        self._steps = list(steps)
        self._next = 0

    def initial_tick_ms(self) -> float:
        return self._steps[0][0]

    def on_tick(self, metrics: TickMetrics) -> Decision:
        _, prefill, decode = self._steps[self._next]
        self._next += 1
        later = self._steps[self._next][0] if self._next < len(self._steps) else None
        assert metrics["now_ms"] == self._steps[self._next - 1][0]
        return {"target_prefill": prefill, "target_decode": decode, "next_tick_ms": later}

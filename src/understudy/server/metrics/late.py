"""Metrics of the machine's lateness."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from understudy.lateness import BOUNDS_S

if TYPE_CHECKING:
    from understudy.lateness import Lateness
    from understudy.server.metrics.families import Histogram, Registry


def add_lateness(registry: Registry, steps: Lateness, tokens: Lateness | None) -> None:
    """Add quantiles and distributions for ends of steps and, if measured, for delivered tokens."""
    sources = {"step_end": steps}
    if tokens is not None:
        sources["token"] = tokens
    for what, source in sources.items():
        for name, share in (("0.5", 0.5), ("0.99", 0.99)):
            registry.gauge(
                "understudy:lateness_quantile_seconds",
                "How late the machine is: tokens delivered and steps ended after they were due.",
                lambda source=source, share=share: source.quantile(share),  # type: ignore[misc]
                what=what,
                quantile=name,
            )
        shown = registry.histogram(
            "understudy:lateness_seconds", "The same as a distribution.", BOUNDS_S, what=what
        )

        def refresh(shown: Histogram = shown, source: Lateness = source) -> None:
            shown.counts = array("q", source.counts)
            shown.count, shown.sum = source.count, source.sum_s

        registry.before_page(refresh)

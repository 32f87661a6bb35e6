"""Metrics of a standalone router."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.proxy.follower import MEANING
from understudy.server.metrics import Registry
from understudy.server.metrics.process import add_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.proxy.workers import Rank, Workers

_COUNTERS = ("gaps", "restarts", "conflicts", "partial_views", "replayed_messages", "dumped_messages")


def router_metrics(workers: Workers, counts: Callable[[], dict[str, int]]) -> Registry:
    """Build the metrics of the router (`counts`, by name) and of each engine behind it."""
    registry = Registry()
    add_process(registry)
    for name in counts():
        registry.gauge(
            f"understudy:router_{name}_requests",
            "Requests that wait here, went by load alone, or to another engine.",
            lambda name=name: float(counts()[name]),  # type: ignore[misc]
        )
    registry.gauge(
        "understudy:router_degraded",
        "1: a user-defined router missed events, because its observe() raised.",
        lambda: float(bool(workers.dispatcher.missed_batches)),
    )
    shown: set[int] = set()

    def show_new() -> None:
        for rank in workers.ranks:
            if id(rank) not in shown:
                shown.add(id(rank))
                _add(registry, rank, workers)

    registry.before_page(show_new)
    return registry


def _add(registry: Registry, rank: Rank, workers: Workers) -> None:
    labels = {"worker": rank.worker.upstream.url, "rank": str(rank.rank)}
    registry.gauge("understudy:router_up", "1: it may be chosen.", lambda: float(rank.worker.up), **labels)
    registry.gauge("understudy:routed_requests", "Sent to a worker.", lambda: float(rank.routed), **labels)
    registry.gauge(
        "understudy:router_missed_event_batches",
        "Batches of an engine's events at which a user-defined router's observe() raised.",
        lambda: float(workers.dispatcher.missed_batches.get(rank.number, 0)),
        **labels,
    )
    for state in MEANING:
        registry.gauge(
            "understudy:router_view",
            "1 for how far the events of an engine are trusted.",
            lambda state=state: float(rank.follower.look() == state),  # type: ignore[misc]
            **labels,
            state=state,
        )
    for name in _COUNTERS:
        registry.gauge(
            f"understudy:router_event_{name}",
            "Of the stream of an engine.",
            lambda name=name: float(rank.follower.counters.get(name, 0)),  # type: ignore[misc]
            **labels,
        )

"""Metrics in addition to vLLM's current ones: those that vLLM has dropped, and adapters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from understudy.server.metrics.families import Registry
    from understudy.server.metrics.vllm import VllmMetrics


def add_old_names(registry: Registry, metrics: VllmMetrics, model_name: str) -> None:
    """Add metrics that vLLM has dropped and dashboards still use."""
    core, label = metrics.core, {"model_name": model_name}
    registry.gauge("vllm:gpu_cache_usage_perc", "Now kv_cache_usage_perc.", lambda: core.usage, **label)
    registry.gauge("vllm:num_requests_swapped", "Always 0: nothing is swapped.", lambda: 0.0, **label)
    queries = registry.counter("vllm:gpu_prefix_cache_queries", "Now prefix_cache_queries.", **label)
    hits = registry.counter("vllm:gpu_prefix_cache_hits", "Now prefix_cache_hits.", **label)

    def refresh() -> None:
        queries.value, hits.value = metrics.queries.value, metrics.hits.value

    registry.before_page(refresh)


def add_adapters(
    registry: Registry, max_lora: int, adapters: Callable[[], tuple[Iterable[str], Iterable[str]]]
) -> None:
    """Add `lora_requests_info`: labels list the adapters of running and waiting requests; the value is the time."""
    name = "vllm:lora_requests_info"

    def refresh() -> None:
        running, waiting = adapters()
        registry.remove(name)
        registry.gauge(
            name,
            "Adapters of the requests at hand.",
            time.time,
            max_lora=str(max_lora),
            running_lora_adapters=",".join(sorted(set(running))),
            waiting_lora_adapters=",".join(sorted(set(waiting))),
        )

    registry.before_page(refresh)

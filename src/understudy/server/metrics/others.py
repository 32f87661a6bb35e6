"""Metrics in addition to vLLM's current ones: SGLang's, those that vLLM has dropped, and adapters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from understudy.server.metrics.families import Registry
from understudy.server.metrics.vllm import VllmMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from understudy.server.core import EngineCore
    from understudy.server.live_request import LiveRequest

FIRST_TOKEN_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
GAP_S = (
    *(
        0.002,
        0.004,
        0.006,
        0.008,
        0.01,
        0.015,
        0.02,
        0.025,
        0.03,
        0.035,
        0.04,
        0.06,
        0.08,
        0.1,
        0.2,
        0.4,
        0.6,
        0.8,
    ),
    *(1, 2, 4, 6, 8),
)
REQUEST_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)


class SglangMetrics(VllmMetrics):
    """The metrics of `VllmMetrics` under SGLang's names only."""

    def __init__(
        self, registry: Registry, core: EngineCore, model_name: str, rank: int, max_model_len: int
    ) -> None:
        super().__init__(Registry(), core, model_name, rank, max_model_len)
        labels = {"model_name": model_name, "engine_type": "unified", "tp_rank": "0", "dp_rank": str(rank)}
        gauge, many = registry.gauge, registry.histogram
        gauge("sglang:num_running_reqs", "Requests in the batch.", lambda: core.num_running, **labels)
        gauge("sglang:num_queue_reqs", "Requests in the queue.", lambda: core.num_waiting, **labels)
        gauge("sglang:token_usage", "Share of the cache that requests hold.", lambda: core.usage, **labels)
        gauge("sglang:cache_hit_rate", "Share of prompt tokens that were cached.", self._hit_rate, **labels)
        gauge("sglang:page_size", "Tokens in a page.", lambda: core.block_size, **labels)
        gauge("sglang:num_pages", "Pages of the cache.", lambda: core.num_blocks, **labels)
        self._prompt = registry.counter("sglang:prompt_tokens", "Tokens of prompts.", **labels)
        self._generated = registry.counter("sglang:generation_tokens", "Tokens generated.", **labels)
        self._requests = registry.counter("sglang:num_requests", "Requests that ended.", **labels)
        self._first = many(
            "sglang:time_to_first_token_seconds", "To the first token.", FIRST_TOKEN_S, **labels
        )
        self._gap = many("sglang:inter_token_latency_seconds", "From a token to the next.", GAP_S, **labels)
        self._e2e = many(
            "sglang:e2e_request_latency_seconds", "From arrival to the end.", REQUEST_S, **labels
        )

    def _hit_rate(self) -> float:
        return self.cached_tokens.value / self.queries.value if self.queries.value else 0.0

    def on_admitted(self, request: LiveRequest) -> None:
        """Count the cache lookup of a prompt."""
        super().on_admitted(request)
        self._prompt.add(request.prompt_tokens)

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None:
        """Count visible tokens."""
        super().on_tokens(request, first, count, now_ns)
        self._generated.add(count)
        if first == 0:
            self._first.observe((now_ns - request.arrival_ns) / 1e9)
        else:
            self._gap.observe((now_ns - request.last_token_ns) / 1e9)

    def on_finished(self, request: LiveRequest, reason: str, tokens: int, max_tokens: int) -> None:
        """Count a finished request."""
        super().on_finished(request, reason, tokens, max_tokens)
        self._requests.add()
        self._e2e.observe((request.finish_ns - request.arrival_ns) / 1e9)


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

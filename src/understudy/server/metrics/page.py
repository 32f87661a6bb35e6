"""The metrics of a worker: those of its process, of each rank, of its HTTP server and of admission."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from understudy.server.metrics.cache_info import add_cache_info
from understudy.server.metrics.families import Registry
from understudy.server.metrics.features import SleepMetrics
from understudy.server.metrics.others import add_old_names
from understudy.server.metrics.process import HttpMetrics, add_process
from understudy.server.metrics.sglang import SglangMetrics
from understudy.server.metrics.trtllm import TrtMetrics
from understudy.server.metrics.vllm import VllmMetrics
from understudy.server.metrics.vllm_offload import describe_offload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from understudy.server.core import EngineCore
    from understudy.server.metrics.families import Counter
    from understudy.server.settings import ServerSettings


METRICS: dict[str, type[VllmMetrics]] = {
    "vllm": VllmMetrics,
    "sglang": SglangMetrics,
    "trtllm": TrtMetrics,
}
"""Metrics of a rank, by the engine whose names they have."""


class MetricsPage(NamedTuple):
    """Metrics that a worker shows on its page, `/metrics`."""

    registry: Registry
    ranks: list[VllmMetrics]
    admission_rejections: dict[str, Counter]
    http: HttpMetrics
    sleep: SleepMetrics

    @classmethod
    def of(cls, settings: ServerSettings, cores: Sequence[EngineCore]) -> MetricsPage:
        """Register the metrics of a worker's engines, under the names of the engine that it simulates."""
        registry = Registry()
        add_process(registry)
        name = settings.names[0]
        own = settings.kind.metrics
        make = METRICS[settings.metrics if own == "vllm" else own]
        ranks: list[VllmMetrics] = [
            make(registry, core, name, rank, settings.max_model_len) for rank, core in enumerate(cores)
        ]
        info = describe_offload(settings) if settings.release.has_offload_info else None
        if info is not None:
            for metrics in ranks:
                metrics.add_offload_info(info)
        if settings.old_metric_names:
            add_old_names(registry, ranks[0], name)
        shown = (
            registry if own == "vllm" else Registry()
        )  # a page in another engine's names has none of vLLM's
        rejections = {
            reason: shown.counter(
                "vllm:admission_rejections", "Requests turned away, by why.", model_name=name, reason=reason
            )
            for reason in ("max_num_queued_reqs", "max_num_queued_tokens")
        }
        if own == "vllm":
            add_cache_info(registry, settings, len(cores))
        return cls(registry, ranks, rejections, HttpMetrics(registry), SleepMetrics(shown))

"""vLLM's metrics of optional features: speculation, offload, loads by stage, block residency, sleep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.server.metrics.vllm_offload import OffloadMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.core import EngineCore
    from understudy.server.metrics.families import Counter, Histogram, Registry

STAY_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600),
    *(1200, 1800),
)
SLEEP_S = (0.01, 0.1, 1, 10, 30, 60, 120, 300, 600)
FETCH_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")


class FeatureMetrics:
    """Metrics of the enabled features of one engine."""

    def __init__(self, registry: Registry, core: EngineCore, labels: dict[str, str]) -> None:
        self._core = core
        self._registry = registry
        self._labels = labels
        self._counters: list[tuple[Counter, Callable[[], float]]] = []
        self.offload_info: dict[str, str] | None = None
        """Labels of kv_offload_config_info, until the metric is added with the first step."""
        self._stay: tuple[Histogram, Histogram, Histogram] | None = None
        if core.draft_tokens:
            self._add_speculation(core.draft_tokens)
        if core.has_tiers:
            self._add_stages()
        self._offload = None if core.offload is None else OffloadMetrics(registry, core, labels)
        if core.stay_sample > 0:
            self._add_stay()

    def on_step(self) -> None:
        """Update the metrics after a step."""
        for counter, read in self._counters:
            counter.value = read()
        if self._offload is not None:
            self._offload.refresh()
        if self.offload_info is not None:
            labels, self.offload_info = {**self.offload_info, **self._labels}, None
            self._registry.gauge(
                "vllm:kv_offload_config_info", "The host offload's settings.", lambda: 1.0, **labels
            )
        if self._stay is None:
            return
        lifetime, idle, gap = self._stay
        for lifetime_ns, idle_ns, gaps_ns in self._core.vllm.take_stays():
            lifetime.observe(lifetime_ns / 1e9)
            idle.observe(idle_ns / 1e9)
            for gap_ns in gaps_ns:
                gap.observe(gap_ns / 1e9)

    def _count(self, name: str, about: str, read: Callable[[], float], **labels: str) -> None:
        counter = self._registry.counter(f"vllm:{name}", about, **self._labels, **labels)
        self._counters.append((counter, read))

    def _add_speculation(self, places: int) -> None:
        core = self._core
        self._count("spec_decode_num_drafts", "Rounds of drafts.", lambda: core.vllm.draft_rounds)
        self._count(
            "spec_decode_num_draft_tokens",
            "Tokens drafted.",
            lambda: core.vllm.drafted_tokens,
        )
        self._count(
            "spec_decode_num_accepted_tokens",
            "Drafts accepted.",
            lambda: core.vllm.accepted_tokens,
        )
        for place in range(places):
            self._count(
                "spec_decode_num_accepted_tokens_per_pos",
                "Drafts accepted, by their place in the round.",
                lambda place=place: core.vllm.accepted_at[place],  # type: ignore[misc]
                position=str(place),
            )

    def _add_stages(self) -> None:
        for place, stage in enumerate(FETCH_STAGES):
            self._registry.gauge(
                "vllm:num_requests_kv_fetch_by_stage",
                "Requests in the queue that need blocks from below, by how far that has come.",
                lambda place=place: self._core.vllm.fetch_stages[place],  # type: ignore[misc]
                stage=stage,
                **self._labels,
            )

    def _add_stay(self) -> None:
        about = {
            "lifetime": "Time that a sampled block stayed on the device.",
            "idle_before_evict": "Time between the last request that used a block and its eviction.",
            "reuse_gap": "Time between two requests that used a block.",
        }
        lifetime, idle, gap = (
            self._registry.histogram(f"vllm:kv_block_{name}_seconds", text, STAY_S, **self._labels)
            for name, text in about.items()
        )
        self._stay = lifetime, idle, gap


class SleepMetrics:
    """Metrics of sleep and wake, from the first request for either."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._durations: dict[str, Histogram] = {}

    def done(self, operation: str, seconds: float) -> None:
        """Count an operation: sleep, release_kv_cache_memory or wake."""
        if operation not in self._durations:
            self._durations[operation] = self._registry.histogram(
                "vllm:sleep_mode_operation_duration_seconds",
                "How long it took.",
                SLEEP_S,
                operation=operation,
            )
            self._registry.gauge(
                "vllm:sleep_mode_operations_in_flight",
                "Such operations under way.",
                lambda: 0.0,
                operation=operation,
            )
        self._durations[operation].observe(seconds)

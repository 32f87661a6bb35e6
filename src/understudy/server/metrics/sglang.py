"""SGLang's metrics of one engine (0.5.23): names, types, labels and buckets as on its page."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from understudy._core import SglangEngine
from understudy.server.metrics.families import Registry
from understudy.server.metrics.vllm import VllmMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.core import EngineCore
    from understudy.server.live_request import LiveRequest, StepEffects
    from understudy.server.metrics.families import Counter

_HUNDREDS_S = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
REQUEST_S = (*_HUNDREDS_S, 600, 1200, 1800, 2400)
GAP_S = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
QUEUE_S = (
    *(0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70, 80, 90),
    *(100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000, 2500, 3000),
)
LENGTHS = (
    *(100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000, 12500, 15000),
    *(17500, 20000, 22500, 25000, 27500, 30000, 35000, 40000, 60000, 80000, 100000, 200000, 300000, 400000),
    *(600000, 800000, 1000000, 1100000),
)
_ZEROS = (
    *("num_grammar_queue_reqs", "swa_token_usage", "mamba_usage"),
    *(f"{pool}_{what}_tokens" for pool in ("swa", "mamba") for what in ("available", "evictable", "used")),
    *(f"spec_{what}" for what in ("accept_length", "accept_rate", "cap_length", "block_accept_length")),
    *("spec_num_steps", "spec_num_draft_tokens", "num_paused_reqs"),
    *(f"num_prefill_{queue}_queue_reqs" for queue in ("bootstrap", "inflight")),
    *(f"num_decode_{queue}_queue_reqs" for queue in ("prealloc", "transfer", "host_receive")),
    *("num_decode_deferred_kv_release_reqs", "pending_prealloc_token_usage"),
    *("prealloc_full_token_usage", "prealloc_swa_token_usage", "num_unique_running_routing_keys"),
)
"""Gauges that are 0 on a server without these features."""
_DROP_REASONS = {"write_back": "host_pressure", "write_through": "write_through_unbacked_eviction"}
"""SGLang's reason for evictions without a copy, by write policy; with the third policy it counts none."""
RATE_STEPS = 40
"""Steps between two values of the throughput, as SGLang's `--decode-log-interval`."""


class SglangMetrics(VllmMetrics):
    """Metrics of one rank under SGLang's names. The engine may be of another kind (`--metrics sglang`)."""

    def __init__(
        self, registry: Registry, core: EngineCore, model_name: str, rank: int, max_model_len: int
    ) -> None:
        super().__init__(Registry(), core, model_name, rank, max_model_len)
        both = {"model_name": model_name, "engine_type": "unified"}
        ranks = {**both, "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
        if rank:
            ranks["dp_rank"] = str(rank)
        self._rate = self._retracted = 0.0
        self._rate_tokens = self._rate_steps = 0
        self._rate_since_ns = self._last_ns = -1
        self._add_gauges(registry, core, ranks, max_model_len)
        self._counted: list[tuple[Counter, Callable[[], float]]] = []
        self._add_counters(registry, core, rank, ranks)
        self._queue_time = registry.histogram("sglang:queue_time_seconds", "In the queue.", QUEUE_S, **ranks)
        self._registry = registry
        self._both = both
        self._by_stream: dict[bool, _RequestMetrics] = {}
        self._gap = registry.histogram(
            "sglang:inter_token_latency_seconds", "From a token to the next.", GAP_S, **both
        )
        self._cached = {
            source: registry.counter(
                "sglang:cached_tokens", "Cached tokens of prompts, by source.", cache_source=source, **both
            )
            for source in ("device", "host")
        }
        self._prefilled = {
            mode: registry.counter(
                "sglang:prefill_effective_tokens",
                "Tokens of admitted prompts, by source.",
                mode=mode,
                **ranks,
            )
            for mode in ("input", "device_hit", "host_hit", "storage_hit")
        }
        self._aborted = registry.counter("sglang:num_aborted_requests", "Requests aborted.", **both)
        self._lengths = [
            registry.histogram(f"sglang:{name}_histogram", about, LENGTHS, **both)
            for name, about in (
                ("prompt_tokens", "Tokens of a prompt."),
                ("uncached_prompt_tokens", "Tokens of a prompt that were computed."),
                ("generation_tokens", "Tokens of an answer."),
            )
        ]

    def _add_gauges(
        self, registry: Registry, core: EngineCore, labels: dict[str, str], max_model_len: int
    ) -> None:
        """Add the scheduler's gauges and its constants."""

        def gauge(name: str, about: str, read: Callable[[], float]) -> None:
            registry.gauge(f"sglang:{name}", about, read, **labels)

        pool = core.num_blocks * core.block_size
        gauge("num_running_reqs", "Running requests.", lambda: self._faked("running", core.num_running))
        gauge("num_queue_reqs", "Requests in the queue.", lambda: self._faked("waiting", core.num_waiting))
        gauge("gen_throughput", "Generated tokens per second.", self._throughput)
        gauge("cache_hit_rate", "Share of prompt tokens that were cached.", self._hit_rate)
        for name in ("token_usage", "full_token_usage"):
            gauge(name, "Share of the pool that requests hold.", lambda: self._faked("usage", core.usage))
        for name in ("num_used_tokens", "kv_used_tokens"):
            gauge(name, "Tokens that requests hold.", lambda: core.active_blocks * core.block_size)
        gauge("num_retracted_reqs", "Requests put back in the last step.", lambda: self._retracted)
        for name, field, about in (
            ("kv_available_tokens", "available", "Free tokens of the pool."),
            ("kv_evictable_tokens", "evictable", "Cached tokens that no request holds."),
            ("new_token_ratio", "new_token_ratio", "Share of outputs that admissions reserve."),
        ):
            gauge(name, about, lambda field=field: self._read_pool(field))  # type: ignore[misc]
        if core.has_tiers and isinstance(core.engine, SglangEngine):
            gauge(
                "hicache_host_used_tokens", "Used tokens of the host.", lambda: self._read_pool("host_used")
            )
            gauge("hicache_host_total_tokens", "Tokens of the host.", lambda: self._read_pool("host_total"))
        for name in _ZEROS:
            gauge(name, "Always 0 here.", lambda: 0.0)
        gauge("utilization", "Always -1: there is no limit to compare with.", lambda: -1.0)
        gauge("max_total_num_tokens", "Tokens of the pool.", lambda: pool)
        gauge("page_size", "Tokens in a page.", lambda: core.block_size)
        gauge("num_pages", "Pages of the pool.", lambda: core.num_blocks)
        gauge("context_len", "Context window, tokens.", lambda: max_model_len)

    def _add_counters(self, registry: Registry, core: EngineCore, rank: int, labels: dict[str, str]) -> None:
        """Add the counters that are read from the engine with the page."""
        registry.before_page(self._refresh)
        cache = {"cache_type": "UnifiedRadixCache", "tp_rank": "0", "pp_rank": "0", "dp_rank": str(rank)}

        def count(name: str, about: str, read: Callable[[], float], labels: dict[str, str]) -> None:
            self._counted.append((registry.counter(f"sglang:{name}", about, **labels), read))

        def count_pool(name: str, about: str, field: str, labels: dict[str, str]) -> None:
            count(name, about, lambda: self._read_pool(field), labels)

        count("num_retracted_requests", "Requests put back into the queue.", lambda: core.preemptions, labels)
        if not isinstance(core.engine, SglangEngine):
            return
        for stage in core.failed_stages or ():
            about = f"Requests that failed in the stage {stage} between two servers."
            count(f"num_{stage}_failed_reqs", about, partial(self._count_failed, stage), labels)
        count_pool("num_retracted_input_tokens", "Prompt tokens of those.", "retracted_inputs", labels)
        count_pool("num_retracted_output_tokens", "Output tokens of those.", "retracted_outputs", labels)
        count_pool("evicted_tokens", "Tokens evicted from the device, with a copy or not.", "evicted", cache)
        if not core.has_tiers:
            return
        kv = {"pool": "kv", **cache}
        count_pool("hicache_backup_tokens", "Tokens copied to the host.", "backed_up", kv)
        count_pool("load_back_tokens", "Tokens loaded from the host.", "loaded_back", kv)
        if reason := _DROP_REASONS.get(core.write_policy):
            about = "Tokens evicted from the device without a copy on the host."
            count_pool("hicache_dropped_tokens", about, "dropped", {"reason": reason, **kv})

    def _read_pool(self, field: str) -> float:
        """Read a field of the engine's pools; 0 for an engine of another kind."""
        engine = self.core.engine
        return float(getattr(engine.tokens, field)) if isinstance(engine, SglangEngine) else 0.0

    def _count_failed(self, stage: str) -> float:
        return float((self.core.failed_stages or {}).get(stage, 0))

    def _refresh(self) -> None:
        for counter, read in self._counted:
            counter.value = read()

    def _hit_rate(self) -> float:
        return self.cached_tokens.value / self.queries.value if self.queries.value else 0.0

    def _throughput(self) -> float:
        return self._rate if self.core.num_running else 0.0

    def _of_streams(self, streams: bool) -> _RequestMetrics:
        """Return the metrics of streamed requests, or of others; as in SGLang, none are shown before the first."""
        if streams not in self._by_stream:
            labels = {**self._both, "is_streaming": "true" if streams else "false"}
            self._by_stream[streams] = _RequestMetrics(self._registry, labels)
        return self._by_stream[streams]

    # ── Events ──

    def on_admitted(self, request: LiveRequest) -> None:
        """Count the cache lookup of a prompt, and its time in the queue."""
        super().on_admitted(request)
        self._queue_time.observe((request.admitted_ns - request.arrival_ns) / 1e9)
        host = sum(request.below_tokens)
        self._prefilled["input"].add(request.prompt_tokens - request.cached_tokens)
        self._prefilled["device_hit"].add(request.cached_tokens - host)
        self._prefilled["host_hit"].add(host)

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None:
        """Count visible tokens."""
        super().on_tokens(request, first, count, now_ns)
        if now_ns != self._last_ns:
            self._count_step(now_ns)
        self._rate_tokens += count
        if first == 0:
            self._of_streams(request.streams).first_token.observe((now_ns - request.arrival_ns) / 1e9)
        else:
            self._gap.observe((now_ns - request.last_token_ns) / 1e9)

    def _count_step(self, now_ns: int) -> None:
        self._last_ns = now_ns
        self._rate_steps += 1
        if self._rate_since_ns < 0 or self._rate_steps > RATE_STEPS:
            passed_ns = now_ns - self._rate_since_ns
            if 0 <= self._rate_since_ns < now_ns:
                self._rate = self._rate_tokens / passed_ns * 1e9
            self._rate_since_ns, self._rate_tokens, self._rate_steps = now_ns, 0, 1

    def on_step(self, effects: StepEffects) -> None:
        """Count a step."""
        before = self.preemptions.value
        super().on_step(effects)
        self._retracted = self.preemptions.value - before

    def on_finished(self, request: LiveRequest, reason: str, tokens: int, max_tokens: int) -> None:
        """Count a finished request."""
        super().on_finished(request, reason, tokens, max_tokens)
        metrics = self._of_streams(request.streams)
        metrics.requests.add()
        metrics.prompt_tokens.add(request.prompt_tokens)
        metrics.generation_tokens.add(tokens)
        metrics.e2e.observe((request.finish_ns - request.arrival_ns) / 1e9)
        if tokens > 1:
            metrics.per_token.observe((request.finish_ns - request.first_token_ns) / 1e9 / (tokens - 1))
        host = sum(request.below_tokens)
        self._cached["device"].add(request.cached_tokens - host)
        self._cached["host"].add(host)
        lengths = (request.prompt_tokens, request.prompt_tokens - request.cached_tokens, tokens)
        for histogram, length in zip(self._lengths, lengths, strict=True):
            histogram.observe(length)

    def on_aborted(self, request: LiveRequest) -> None:
        """Count an aborted request."""
        super().on_aborted(request)
        self._aborted.add()


class _RequestMetrics:
    """Metrics of ended requests, streamed or whole."""

    def __init__(self, registry: Registry, labels: dict[str, str]) -> None:
        self.requests = registry.counter("sglang:num_requests", "Requests that ended.", **labels)
        self.prompt_tokens = registry.counter("sglang:prompt_tokens", "Tokens of prompts.", **labels)
        self.generation_tokens = registry.counter("sglang:generation_tokens", "Tokens generated.", **labels)
        self.first_token = registry.histogram(
            "sglang:time_to_first_token_seconds", "To the first token.", _HUNDREDS_S, **labels
        )
        self.e2e = registry.histogram(
            "sglang:e2e_request_latency_seconds", "From arrival to the end.", REQUEST_S, **labels
        )
        self.per_token = registry.histogram(
            "sglang:request_time_per_output_token_seconds", "Mean gap of a request.", GAP_S, **labels
        )

"""vLLM's metrics of one engine (0.32 and 0.33): names, labels and buckets as on its page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.server.metrics.features import FeatureMetrics
from understudy.server.quantiles import FINE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.core import EngineCore
    from understudy.server.live_request import LiveRequest, StepEffects
    from understudy.server.metrics.families import Registry

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
)
GAP_S = (
    *(
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.15,
        0.2,
        0.3,
        0.4,
        0.5,
        0.75,
        1.0,
        2.5,
        5.0,
        7.5,
        10.0,
        20.0,
        40.0,
        80.0,
    ),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
ENDS = ("stop", "length", "abort", "error", "repetition")


def decade_bounds(largest: int) -> list[int]:
    """Return the bounds 1, 2, 5, 10, … up to `largest`."""
    bounds: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > largest:
                return bounds
            bounds.append(step * scale)
        scale *= 10


class VllmMetrics:
    """Metrics of one rank. `model_name` is the first served name, `engine` the rank."""

    def __init__(
        self, registry: Registry, core: EngineCore, model_name: str, rank: int, max_model_len: int
    ) -> None:
        self.core = core
        self.asleep = "awake"
        self.fake: dict[str, Callable[[], float]] = {}
        """Readers of injected values that replace the true ones: running, waiting, usage."""
        both = {"model_name": model_name, "engine": str(rank)}
        counter, gauge = registry.counter, registry.gauge
        for what in ("flops", "read_bytes", "write_bytes"):
            counter(f"vllm:estimated_{what}_per_gpu", "Always 0: nothing is computed.", **both)
        gauge(
            "vllm:num_requests_running",
            "Requests in the batch.",
            lambda: self._faked("running", core.num_running),
            **both,
        )
        gauge(
            "vllm:num_requests_waiting",
            "Requests in the queue.",
            lambda: self._faked("waiting", core.num_waiting),
            **both,
        )
        for reason, read in (("capacity", self._capacity), ("deferred", self._deferred)):
            gauge(
                "vllm:num_requests_waiting_by_reason",
                "Requests in the queue, by why.",
                read,
                reason=reason,
                **both,
            )
        for state in ("awake", "weights_offloaded", "discard_all"):
            gauge(
                "vllm:engine_sleep_state",
                "1 for the state that the engine is in.",
                lambda state=state: float(self.asleep == state),  # type: ignore[misc]
                sleep_state=state,
                **both,
            )
        gauge(
            "vllm:kv_cache_usage_perc",
            "Share of blocks that requests hold.",
            lambda: self._faked("usage", core.usage),
            **both,
        )
        self.queries = counter("vllm:prefix_cache_queries", "Tokens looked up.", **both)
        self.hits = counter("vllm:prefix_cache_hits", "Tokens found.", **both)
        self.external_queries = counter(
            "vllm:external_prefix_cache_queries", "Tokens looked up in tiers below.", **both
        )
        self.external_hits = counter("vllm:external_prefix_cache_hits", "Tokens found there.", **both)
        counter("vllm:mm_cache_queries", "Always 0: text only.", **both)
        counter("vllm:mm_cache_hits", "Always 0: text only.", **both)
        self.preemptions = counter("vllm:num_preemptions", "Requests put back into the queue.", **both)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Tokens of prompts, cached or not.", **both)
        self.by_source = {
            source: counter(
                "vllm:prompt_tokens_by_source",
                "Tokens of prompts, by where they came from.",
                source=source,
                **both,
            )
            for source in ("local_compute", "local_cache_hit", "external_kv_transfer")
        }
        self.cached_tokens = counter(
            "vllm:prompt_tokens_cached", "Tokens of prompts that were cached.", **both
        )
        self.cached_by = {
            source: counter(
                "vllm:prompt_tokens_cached_by_source",
                "Cached tokens, by where they lay.",
                source=source,
                **both,
            )
            for source in ("device", "host", "p2p", "disk", "external_unspecified")
        }
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.", **both)
        self.success = {
            end: counter("vllm:request_success", "Requests that ended, by how.", finished_reason=end, **both)
            for end in ENDS
        }
        lengths = decade_bounds(max_model_len)
        many = registry.histogram
        self.request_prompt = many("vllm:request_prompt_tokens", "Tokens of a prompt.", lengths, **both)
        self.request_generation = many(
            "vllm:request_generation_tokens", "Tokens of an answer.", lengths, **both
        )
        self.iteration = many("vllm:iteration_tokens_total", "Tokens of a step.", STEP_TOKENS, **both)
        self.request_max_generation = many(
            "vllm:request_max_num_generation_tokens", "Most tokens of a request's answers.", lengths, **both
        )
        self.params_n = many("vllm:request_params_n", "Answers asked for.", (1, 2, 5, 10, 20), **both)
        self.params_max_tokens = many(
            "vllm:request_params_max_tokens", "Tokens asked for at most.", lengths, **both
        )
        self.first_token = many(
            "vllm:time_to_first_token_seconds",
            "From arrival to the first token.",
            FIRST_TOKEN_S,
            FINE_S,
            **both,
        )
        self.gap = many(
            "vllm:inter_token_latency_seconds", "From a token to the next.", GAP_S, FINE_S, **both
        )
        self.per_token = many(
            "vllm:request_time_per_output_token_seconds", "Mean gap of a request.", GAP_S, **both
        )
        self.e2e = many("vllm:e2e_request_latency_seconds", "From arrival to the end.", REQUEST_S, **both)
        self.queue_s = many("vllm:request_queue_time_seconds", "In the queue.", REQUEST_S, **both)
        self.inference_s = many(
            "vllm:request_inference_time_seconds", "From the queue to the end.", REQUEST_S, **both
        )
        self.prefill_s = many(
            "vllm:request_prefill_time_seconds", "From the queue to the first token.", REQUEST_S, **both
        )
        self.decode_s = many(
            "vllm:request_decode_time_seconds", "From the first token to the last.", REQUEST_S, **both
        )
        self.request_preemptions = many(
            "vllm:request_num_preemptions",
            "How often a request was put back.",
            (1, 2, 3, 4, 5, 10, 20),
            **both,
        )
        self.kv_computed = many(
            "vllm:request_prefill_kv_computed_tokens",
            "Tokens of a prompt that were computed.",
            lengths,
            **both,
        )
        self._features = FeatureMetrics(registry, core, both)

    def add_offload_info(self, labels: dict[str, str]) -> None:
        """Add the metric of the host offload's settings, with the next step."""
        self._features.offload_info = labels

    def _faked(self, name: str, truth: float) -> float:
        return self.fake[name]() if name in self.fake else truth

    def _capacity(self) -> float:
        now = self.core.engine.snapshot()
        return float(now.waiting - (now.loading - now.parked))

    def _deferred(self) -> float:
        return float(self.core.engine.snapshot().loading if self.core.waits_for_transfers else 0)

    # ── Events ──

    def on_admitted(self, request: LiveRequest) -> None:
        """Count the cache lookup of a prompt."""
        cached, external = request.cached_tokens, sum(request.below_tokens) + request.pulled_tokens
        local = cached - external
        self.queries.add(request.prompt_tokens)
        self.hits.add(local)
        if self.core.waits_for_transfers:
            self.external_queries.add(request.prompt_tokens - local)
            self.external_hits.add(external)
        self.prompt_tokens.add(request.prompt_tokens)
        self.by_source["local_compute"].add(request.prompt_tokens - cached)
        self.by_source["local_cache_hit"].add(local)
        self.by_source["external_kv_transfer"].add(external)
        self.cached_tokens.add(cached)
        sources = ("device", "host", "disk", "external_unspecified")
        for source, tokens in zip(sources, (local, *request.below_tokens), strict=True):
            self.cached_by[source].add(tokens)
        self.cached_by["external_unspecified"].add(request.pulled_tokens)

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None:
        """Count visible tokens."""
        self.generation_tokens.value += count
        if first == 0:
            self.first_token.observe((now_ns - request.arrival_ns) / 1e9)
        else:
            self.gap.observe((now_ns - request.last_token_ns) / 1e9)

    def on_step(self, effects: StepEffects) -> None:
        """Count a step."""
        self.iteration.observe(effects.batch_tokens)
        self.preemptions.value = self.core.preemptions
        self._features.on_step()

    def on_finished(self, request: LiveRequest, reason: str, tokens: int, max_tokens: int) -> None:
        """Count a finished request."""
        self.success[reason].add()
        self.request_prompt.observe(request.prompt_tokens)
        self.request_generation.observe(tokens)
        self.params_max_tokens.observe(max_tokens)
        self.kv_computed.observe(request.prompt_tokens - request.cached_tokens)
        self.request_preemptions.observe(request.preemptions)
        end = request.finish_ns
        self.e2e.observe((end - request.arrival_ns) / 1e9)
        self.queue_s.observe((request.admitted_ns - request.arrival_ns) / 1e9)
        self.inference_s.observe((end - request.admitted_ns) / 1e9)
        self.prefill_s.observe((request.first_token_ns - request.admitted_ns) / 1e9)
        decode_s = (end - request.first_token_ns) / 1e9
        self.decode_s.observe(decode_s)
        self.per_token.observe(decode_s / (tokens - 1) if tokens > 1 else 0.0)

    def on_aborted(self, request: LiveRequest) -> None:
        """Count a request that the server or the engine aborted; vLLM does not."""

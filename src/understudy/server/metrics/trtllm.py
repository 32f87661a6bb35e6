"""TensorRT-LLM's metrics of one engine (1.3.0rc25): names, labels and buckets, and its iteration statistics."""

from __future__ import annotations

from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING, Any

from understudy._core import TrtEngine
from understudy.server.metrics.families import Registry
from understudy.server.metrics.vllm import FIRST_TOKEN_S, GAP_S, REQUEST_S, VllmMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.server.core import EngineCore
    from understudy.server.live_request import LiveRequest, StepEffects
    from understudy.server.metrics.families import Histogram

_PREFILL_S = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
    2560.0,
)
_KEPT = 1000
"""Iterations that are kept where no number is given."""
_UNUSED = (
    *("maxBatchSizeStatic", "maxBatchSizeTunerRecommended", "maxBatchSizeRuntime", "maxNumTokensStatic"),
    *("maxNumTokensTunerRecommended", "maxNumTokensRuntime", "cpuMemUsage", "pinnedMemUsage", "gpuMemUsage"),
)
"""Fields that are 0: the PyTorch backend does not set them, or nothing is computed here."""
_STATIC = ("emptyGenSlots", "numContextRequests", "numCtxTokens", "numGenTokens", "numScheduledRequests")


class TrtMetrics(VllmMetrics):
    """Metrics of one rank under TensorRT-LLM's names, and its iteration statistics."""

    def __init__(
        self, registry: Registry, core: EngineCore, model_name: str, rank: int, max_model_len: int
    ) -> None:
        super().__init__(Registry(), core, model_name, rank, max_model_len)
        self.iterations: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        """Statistics since they were last read; empty unless `keep_iterations` was called."""
        self._keeps_iterations = False
        self._is_overlapped = True
        self._most_active = 0
        self._rank = rank
        self._last: dict[str, Any] = {}
        self._reused = self._missed = 0
        self._completed = self._activated = 0
        both = {"model_name": model_name, "engine_type": "pytorch"}
        if rank:
            both["rank"] = str(rank)
        self._registry, self._both = registry, both
        self._add_counters()
        self._add_gauges()

    def keep_iterations(self, most: int | None, *, most_active: int, is_overlapped: bool) -> None:
        """Keep statistics of each iteration until they are read: `most` (−1: all; None: TensorRT-LLM's default)."""
        self.iterations = deque(maxlen=_KEPT if most is None else None if most < 0 else most)
        self._keeps_iterations = True
        self._most_active, self._is_overlapped = most_active, is_overlapped

    def take_iterations(self) -> list[dict[str, Any]]:
        """Return the statistics since the last call."""
        found = list(self.iterations)
        self.iterations.clear()
        return found

    def _add_counters(self) -> None:
        def count(name: str, about: str, **labels: str) -> Any:
            return self._registry.counter(f"trtllm_{name}", about, **labels, **self._both)

        def times(name: str, about: str, bounds: tuple[float, ...]) -> Histogram:
            return self._registry.histogram(f"trtllm_{name}_seconds", about, bounds, **self._both)

        self._success: dict[str, Any] = {}
        self._count = count
        self._prompt_tokens = count("prompt_tokens", "Tokens of prompts.")
        self._generation_tokens = count("generation_tokens", "Generated tokens.")
        self._cached_tokens = count("prompt_cached_tokens", "Tokens of prompts that were cached.")
        self._reused_blocks = count("kv_cache_reused_blocks", "Blocks of prompts that were cached.")
        self._missed_blocks = count("kv_cache_missed_blocks", "Blocks of prompts that were not.")
        self._ended = count("num_requests_completed", "Requests that ended, over all iterations.")
        self._e2e = times("e2e_request_latency", "From arrival to the end.", REQUEST_S)
        self._first = times("time_to_first_token", "From arrival to the first token.", FIRST_TOKEN_S)
        self._each = times("time_per_output_token", "Mean gap of a request.", GAP_S)
        self._queue = times("request_queue_time", "Waiting.", REQUEST_S)
        self._prefill = times("request_prefill_time", "From scheduling to the first token.", _PREFILL_S)
        self._decode = times("request_decode_time", "From the first token to the last.", REQUEST_S)
        self._inference = times("request_inference_time", "From scheduling to the last token.", REQUEST_S)

    def _add_gauges(self) -> None:
        core = self.core

        def gauge(name: str, about: str, read: Callable[[], float]) -> None:
            self._registry.gauge(f"trtllm_{name}", about, read, **self._both)

        def of_last(section: str, field: str) -> Callable[[], float]:
            return lambda: float(self._last.get(section, {}).get(field, 0))

        gauge("num_requests_running", "Active requests.", lambda: self._faked("running", core.num_running))
        gauge("num_requests_waiting", "Queued requests.", lambda: self._faked("waiting", core.num_waiting))
        gauge("max_num_active_requests", "Most active requests.", lambda: self._most_active)
        gauge("kv_cache_utilization", "Used share of blocks.", lambda: self._faked("usage", core.usage))
        gauge("kv_cache_hit_rate", "Share of blocks of prompts that were cached.", self._block_hit_rate)
        gauge("kv_cache_max_blocks", "Blocks of the device.", lambda: core.num_blocks)
        gauge("kv_cache_used_blocks", "Blocks that requests hold.", lambda: core.active_blocks)
        gauge("kv_cache_free_blocks", "Other blocks.", lambda: core.num_blocks - core.active_blocks)
        gauge("kv_cache_tokens_per_block", "Tokens of a block.", lambda: core.block_size)
        gauge(
            "iteration_latency_seconds",
            "Time of the last iteration.",
            lambda: float(self._last.get("iterLatencyMS", 0.0)) / 1e3,
        )
        batch = "inflightBatchingStats"
        for name, field, about in (
            ("num_context_requests", "numContextRequests", "Prompts in the last batch."),
            ("num_generation_requests", "numGenRequests", "Requests in generation in the last batch."),
            ("num_paused_requests", "numPausedRequests", "Requests that the last pass paused."),
            ("num_scheduled_requests", "numScheduledRequests", "Requests in the last batch."),
            ("total_context_tokens", "numCtxTokens", "Prompt tokens in the last batch."),
        ):
            gauge(name, about, of_last(batch, field))

    def _block_hit_rate(self) -> float:
        return self._reused / (self._reused + self._missed) if self._reused else 0.0

    # ── Events ──

    def on_admitted(self, request: LiveRequest) -> None:
        """Count the blocks of a prompt that were cached."""
        super().on_admitted(request)
        self._activated += 1
        size = self.core.block_size
        reused = -(-request.cached_tokens // size)
        missed = -(-request.prompt_tokens // size) - reused
        self._reused += reused
        self._missed += missed
        self._reused_blocks.add(reused)
        self._missed_blocks.add(missed)
        self._cached_tokens.add(request.cached_tokens)

    def on_tokens(self, request: LiveRequest, first: int, count: int, now_ns: int) -> None:
        """Count visible tokens."""
        super().on_tokens(request, first, count, now_ns)
        self._generation_tokens.value += count

    def on_step(self, effects: StepEffects) -> None:
        """Describe the iteration."""
        super().on_step(effects)
        self._completed = len(effects.finished)
        self._ended.add(self._completed)
        self._last = self._describe()
        if self._keeps_iterations:
            self.iterations.append(self._last)

    def on_finished(self, request: LiveRequest, reason: str, tokens: int, max_tokens: int) -> None:
        """Count a finished request."""
        super().on_finished(request, reason, tokens, max_tokens)
        if reason not in self._success:
            self._success[reason] = self._count("request_success", "Requests.", finished_reason=reason)
        self._success[reason].add()
        self._prompt_tokens.add(request.prompt_tokens)
        end_ns = max(request.finish_ns, request.last_token_ns)
        decode_s = (end_ns - request.first_token_ns) / 1e9
        self._e2e.observe((end_ns - request.arrival_ns) / 1e9)
        self._first.observe((request.first_token_ns - request.arrival_ns) / 1e9)
        self._queue.observe((request.admitted_ns - request.arrival_ns) / 1e9)
        self._prefill.observe((request.first_token_ns - request.admitted_ns) / 1e9)
        self._decode.observe(decode_s)
        self._inference.observe((end_ns - request.admitted_ns) / 1e9)
        if tokens > 1:
            self._each.observe(decode_s / (tokens - 1))

    # ── Iteration statistics ──

    def _describe(self) -> dict[str, Any]:
        """Return the statistics of the iteration that has ended, by TensorRT-LLM's names."""
        core, engine = self.core, self.core.engine
        now = engine.snapshot()
        activated, self._activated = self._activated, 0
        used = now.active_blocks
        stats: dict[str, Any] = {
            **dict.fromkeys(_UNUSED, 0),
            "timestamp": datetime.now().strftime("%m-%d-%Y %H:%M:%S.%f"),
            "iter": core.steps,
            "iterLatencyMS": engine.iteration.duration_ns / 1e6 if isinstance(engine, TrtEngine) else 0.0,
            "newActiveRequestsQueueLatencyMS": 0.0,
            "numNewActiveRequests": activated,
            "numActiveRequests": now.running,
            "numQueuedRequests": now.waiting,
            "numCompletedRequests": self._completed,
            "maxNumActiveRequests": self._most_active,
            "kvCacheStats": {
                "maxNumBlocks": core.num_blocks,
                "freeNumBlocks": core.num_blocks - used,
                "usedNumBlocks": used,
                "tokensPerBlock": core.block_size,
                "allocTotalBlocks": self._reused + self._missed,
                "allocNewBlocks": self._missed,
                "reusedBlocks": self._reused,
                "missedBlocks": self._missed,
                "cacheHitRate": self._block_hit_rate(),
            },
            "staticBatchingStats": dict.fromkeys(_STATIC, 0),
            "inflightBatchingStats": self._describe_batch(now.waiting),
            "specDecodingStats": None,
            "attentionDpRank": self._rank,
            "schedulerMode": "overlap" if self._is_overlapped else "non_overlap",
        }
        return stats

    def _count_queued_tokens(self) -> int:
        return sum(one.prompt_tokens for one in self.core.live.values() if one.admitted_ns < 0)

    def _describe_batch(self, queued: int) -> dict[str, Any]:
        engine = self.core.engine
        if not isinstance(engine, TrtEngine):
            return {}
        batch = engine.iteration
        return {
            "numScheduledRequests": batch.contexts + batch.generation,
            "numContextRequests": batch.contexts,
            "numGenRequests": batch.generation,
            "numPausedRequests": batch.paused,
            "numCtxTokens": batch.context_tokens,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 0.0,
            "numCtxKvTokens": batch.context_kv_tokens,
            "numGenKvTokens": batch.generation_kv_tokens,
            "numQueuedContextRequests": queued,
            "numQueuedCtxTokens": self._count_queued_tokens() if queued else 0,
            "numQueuedGenRequests": 0,
            "numQueuedGenKvTokens": 0,
            "numPausedKvTokens": 0,
        }

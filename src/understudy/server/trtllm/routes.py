"""Routes of trtllm-serve."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from understudy.server.access import RouteClass, route_class
from understudy.server.api.developer import Later, PlainReply
from understudy.server.api.fields import Fields, read_body
from understudy.server.metrics.trtllm import TrtMetrics
from understudy.server.sglang.routes import check_by_generating
from understudy.server.trtllm.block_hash import name_algorithm

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.http import Request
    from understudy.server.trtllm.endpoints import TrtEndpoints
    from understudy.server.worker import Worker

    Plain = Callable[[Request, dict[str, str]], tuple[int, Any]]

_PUBLIC = frozenset(
    (
        *("/health_generate", "/server_info", "/kv_cache_events", "/steady_clock_offset", "/energy_metrics"),
        *("/prometheus/metrics", "/_internal/tokenize"),
    )
)


def trt_route_class(path: str) -> RouteClass:
    """Classify a path: trtllm-serve has no keys, so that ours protect what vLLM's protect."""
    return RouteClass.PUBLIC if path in _PUBLIC else route_class(path)


class TrtRoutes:
    """Tables of routes, as `api.routes.Routes` has them."""

    adapters = None

    def __init__(self, worker: Worker, endpoints: TrtEndpoints) -> None:
        self._worker = worker
        self._logs = endpoints.logs
        self.generators = {
            "/v1/completions": endpoints.completions,
            "/v1/chat/completions": endpoints.chat,
        }
        self.plain: dict[str, dict[str, Plain]] = {
            "/version": {"GET": lambda *_: (200, {"version": self._version})},
            "/v1/models": {"GET": self._models},
            "/metrics": {"GET": self._iterations},
            "/kv_cache_events": {"POST": self._cache_events},
            "/health_generate": {"GET": self._health_generate},
            "/server_info": {"GET": self._server_info},
            "/steady_clock_offset": {"GET": self._clock, "POST": lambda *_: (200, None)},
            "/energy_metrics": {
                "GET": lambda *_: (503, {"error": "Energy monitoring is not available"}),
            },
            "/_internal/tokenize": {"POST": self._tokenize},
            "/kv_event_sources": {"GET": self._event_sources},
        }
        engine: Any = worker.settings.engine
        for metrics in worker.metrics if engine.enable_iter_perf_stats else ():
            assert isinstance(metrics, TrtMetrics)
            metrics.keep_iterations(
                engine.iter_stats_max_iterations,
                most_active=engine.max_num_seqs or 0,
                is_overlapped=not engine.disable_overlap_scheduler,
            )

    def read(self, request: Request) -> dict[str, Any]:
        """Read the body of a generation request. ApiError when it is invalid."""
        return read_body(request)

    def methods_of(self, path: str) -> tuple[str, ...]:
        """List the methods that a path accepts."""
        return ("POST",) if path in self.generators else tuple(self.plain.get(path, {}))

    @property
    def _version(self) -> str:
        return self._worker.settings.kind.version_of(self._worker.settings.engine)

    def _models(self, *_: object) -> tuple[int, Any]:
        card = {"object": "model", "created": int(time.time()), "owned_by": "tensorrt_llm"}
        return 200, {
            "object": "list",
            "data": [{"id": name, **card} for name in self._worker.settings.names],
        }

    def _iterations(self, *_: object) -> tuple[int, Any]:
        """Return the iteration statistics since the last call; none without `enable_iter_perf_stats`."""
        found: list[dict[str, Any]] = []
        for metrics in self._worker.metrics:
            if isinstance(metrics, TrtMetrics):
                found += metrics.take_iterations()
        return 200, found

    def _cache_events(self, *_: object) -> tuple[int, Any]:
        """Return the KV events since the last call; none without `event_buffer_max_size`."""
        return 200, [event for log in self._logs for event in log.take()]

    def _health_generate(self, *_: object) -> tuple[int, Any]:
        worker = self._worker

        def start(reply: Callable[[Any], None]) -> None:
            def answer(up: bool) -> None:
                text = "Generation health check OK" if up else "Generation health check failed"
                reply(PlainReply(200 if up else 500, text))

            if worker.failed:
                answer(False)
            else:
                check_by_generating(worker, answer)

        return 200, Later(start)

    def _server_info(self, *_: object) -> tuple[int, Any]:
        engine = self._worker.settings.engine
        return 200, {
            "disaggregated_params": None,
            "max_batch_size": engine.max_num_seqs,
            "kv_cache_hash_algo": name_algorithm(engine),
            "tokens_per_block": engine.block_size,
            "startup_metrics": {},
        }

    def _clock(self, *_: object) -> tuple[int, Any]:
        received = time.monotonic()

        def start(reply: Callable[[Any], None]) -> None:
            def answer() -> None:
                reply({"receive_ts": received, "transmit_ts": time.monotonic()})

            asyncio.get_running_loop().call_later(0.2, answer)

        return 200, Later(start)

    def _tokenize(self, request: Request, _: dict[str, str]) -> tuple[int, Any]:
        fields = Fields(read_body(request))
        prompts = fields.texts("prompt")
        fields.done()
        ids = self._worker.tokenizer.encode(prompts[0])
        return 200, {"count": len(ids), "tokens": ids}

    def _event_sources(self, *_: object) -> tuple[int, Any]:
        """Describe the publishers of KV events, for `understudy router`; trtllm-serve has no such route."""
        return 200, {str(rank): sender.describe() for rank, sender in enumerate(self._worker.senders)}

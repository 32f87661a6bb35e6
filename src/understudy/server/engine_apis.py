"""The HTTP API that the engines of each kind answer with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from understudy.server.access import RouteClass, route_class
from understudy.server.api.endpoints import Endpoints
from understudy.server.api.routes import Routes
from understudy.server.sglang.endpoints import SglangEndpoints
from understudy.server.sglang.errors import error_bytes
from understudy.server.sglang.routes import SglangRoutes, sglang_route_class
from understudy.server.trtllm.endpoints import TrtEndpoints
from understudy.server.trtllm.errors import error_bytes as trt_error_bytes
from understudy.server.trtllm.routes import TrtRoutes, trt_route_class

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.engines.kinds.kind import EngineKind
    from understudy.server.api.errors import ApiError
    from understudy.server.worker import Worker


class EngineApi(NamedTuple):
    """Routes of one kind of engine, and the forms of its answers."""

    make_routes: Callable[[Worker], tuple[Endpoints, Routes | SglangRoutes | TrtRoutes]]
    """Make the generation endpoints of a worker and its tables of routes."""
    classify: Callable[[str], RouteClass]
    """Classify a path by the clients that may call it."""
    state_route: str | None
    """The route next to /health that shows whether the engine works: /load or /health_generate; None: its own."""
    metrics_route: str = "/metrics"
    """The route of the Prometheus page."""
    error_form: Callable[[ApiError, str], bytes] | None = None
    """The body of an error, by the path of the request; None: OpenAI's form."""


def _make_vllm_routes(worker: Worker) -> tuple[Endpoints, Routes]:
    endpoints = Endpoints(worker)
    return endpoints, Routes(worker, endpoints)


def _make_sglang_routes(worker: Worker) -> tuple[Endpoints, SglangRoutes]:
    endpoints = SglangEndpoints(worker)
    return endpoints, SglangRoutes(worker, endpoints)


def _make_trtllm_routes(worker: Worker) -> tuple[Endpoints, TrtRoutes]:
    endpoints = TrtEndpoints(worker)
    return endpoints, TrtRoutes(worker, endpoints)


VLLM_API = EngineApi(_make_vllm_routes, route_class, "/load")
APIS = {
    "vllm": VLLM_API,
    "sglang": EngineApi(_make_sglang_routes, sglang_route_class, "/health_generate", error_form=error_bytes),
    "trtllm": EngineApi(_make_trtllm_routes, trt_route_class, None, "/prometheus/metrics", trt_error_bytes),
}
"""APIs by kind of engine; a kind without an entry answers as vLLM does."""


def find_api(kind: EngineKind) -> EngineApi:
    """Return the API that engines of a kind answer with."""
    return APIS.get(kind.name, VLLM_API)

"""Queries to an engine before it is registered: readiness, event endpoints, block size, adapters."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.proxy.follower import EventSource
from understudy.proxy.upstream import Upstream, UpstreamError
from understudy.server.api.fields import whole_number

if TYPE_CHECKING:
    from understudy.proxy.address import WorkerAddress

log = logging.getLogger("understudy.router")

_LABEL = re.compile(
    r'^(?:vllm:cache_config_info\{[^}]*?\bblock_size="|sglang:page_size\{[^}]*\} )(\d+)', re.MULTILINE
)
_SERVER_INFO = re.compile(r'"tokens_per_block":\s*(\d+)')
_WILD = ("*", "0.0.0.0", "[::]", "::", "")


async def require_ready(upstream: Upstream) -> None:
    """Raise UpstreamError while an engine loads: its other routes are not valid yet."""
    status, _ = await upstream.get("/health")
    if status != 200:
        raise UpstreamError(f"{upstream.url}/health says {status}")


async def read_event_sources(upstream: Upstream, address: WorkerAddress) -> list[EventSource | None]:
    """Return the event endpoints of each rank, as given or as the engine lists them; None: a rank without events."""
    if address.events is not None:
        return [EventSource(address.events, address.replay, address.topic)]
    status, body = await upstream.get("/kv_event_sources")
    if status != 200:  # before vLLM 0.32
        return [None]
    try:
        listed = msgspec.json.decode(body, type=dict[str, dict[str, Any]])
    except msgspec.DecodeError:
        raise UpstreamError(f"{upstream.url}/kv_event_sources is not what vLLM says there") from None
    sources: list[EventSource | None] = []
    for rank in sorted(listed, key=lambda name: whole_number(name) or 0):
        config = listed[rank]
        if not config.get("endpoint") or config.get("enable_kv_cache_events") is False:
            sources.append(None)
            continue
        sources.append(
            EventSource(
                _reachable(str(config["endpoint"]), upstream.host),
                None
                if not config.get("replay_endpoint")
                else _reachable(config["replay_endpoint"], upstream.host),
                config.get("topic") or None,
            )
        )
    return sources or [None]


async def read_block_size(upstream: Upstream) -> int | None:
    """Return the tokens per block (SGLang: per page) that /metrics states; None if it states none."""
    status, page = await upstream.get("/metrics")
    found = _LABEL.search(page.decode("utf-8", "replace")) if status == 200 else None
    if found is None:  # TensorRT-LLM's /metrics has statistics, and /server_info its settings
        status, page = await upstream.get("/server_info")
        found = _SERVER_INFO.search(page.decode("utf-8", "replace")) if status == 200 else None
    return None if found is None else int(found[1])


async def read_adapters(upstream: Upstream) -> set[str]:
    """Return the LoRA adapters that an engine lists; empty if it lists none or needs another key."""
    status, body = await upstream.get("/v1/models")
    if status == 401:
        log.warning("%s/v1/models: needs a key; give the router the engine's --api-key", upstream.url)
    if status != 200:
        return set()
    try:
        cards = msgspec.json.decode(body)["data"]
        return {str(card["id"]) for card in cards if card.get("parent")}
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return set()


def _reachable(endpoint: str, host: str) -> str:
    """Replace a wildcard address such as `tcp://*:5557` by the engine's host."""
    scheme, _, rest = endpoint.partition("://")
    name, colon, port = rest.rpartition(":")
    return f"{scheme}://{host}:{port}" if colon and scheme == "tcp" and name in _WILD else endpoint

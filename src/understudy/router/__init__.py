"""Routers: which worker gets a request.

Simple ones go by their names; `KvRouting` chooses by caches and load; a `Router` of your own is an object with
`choose(request, view)` and, if it wants KV events, `observe(batch)`. `PrefixIndex` is what a router knows of caches.
"""

from understudy._core import FleetView, KvEventBatch, RouteRequest
from understudy.router.kv import Decisions, KvRouter, KvRouting
from understudy.router.prefix_index import Applied, IndexDump, Matches, PrefixIndex
from understudy.router.router import Router

__all__ = [
    "Applied",
    "Decisions",
    "FleetView",
    "IndexDump",
    "KvEventBatch",
    "KvRouter",
    "KvRouting",
    "Matches",
    "PrefixIndex",
    "RouteRequest",
    "Router",
]

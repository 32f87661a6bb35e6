"""Routing: what a router knows of caches, and how it chooses a worker.

`round_robin`, `random` and `least_loaded` go by their names; a `Router` of your own is an object with
`choose(request, view)` and, if it wants KV events, `observe(batch)`.
"""

from understudy._core import FleetView, KvEventBatch, RouteRequest
from understudy.router.prefix_index import Applied, IndexDump, Matches, PrefixIndex
from understudy.router.router import Router

__all__ = [
    "Applied",
    "FleetView",
    "IndexDump",
    "KvEventBatch",
    "Matches",
    "PrefixIndex",
    "RouteRequest",
    "Router",
]

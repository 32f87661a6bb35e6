"""Routers, which choose a worker for each request.

Simple policies have names; `KvRouting` chooses by cached prefixes and load; a user-defined `Router` is an object with
`choose(request, view)` and, to receive KV events, `observe(batch)`. `PrefixIndex` maps cached blocks to workers.
"""

from understudy._core import FleetView, KvEventBatch, RouteRequest
from understudy.events.columns import EventKind
from understudy.router.choice import Choice
from understudy.router.delayed import DelayedEvents
from understudy.router.kv import Decisions, KvRouter, KvRouting
from understudy.router.prefix_index import Applied, IndexDump, Matches, PrefixIndex
from understudy.router.router import Router

__all__ = [
    "Applied",
    "Choice",
    "Decisions",
    "DelayedEvents",
    "EventKind",
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

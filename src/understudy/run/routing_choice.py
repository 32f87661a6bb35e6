"""`RoutingChoice`: the name of a routing, settings of the KV-aware router, or a router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from understudy._core import NativeRouter
    from understudy.router import Router
    from understudy.router.delayed import DelayedEvents
    from understudy.router.kv import KvRouting

    RoutingChoice: TypeAlias = "Routing | KvRouting | Router | DelayedEvents | NativeRouter"

Routing = Literal[
    "round_robin", "random", "least_loaded", "power_of_two", "session_affinity", "session_tree", "kv"
]

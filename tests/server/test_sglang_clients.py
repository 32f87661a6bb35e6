"""SGLang's router in front of live SGLang servers, where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from server.clients import Target
from server.sglang_clients import POLICIES, route
from server.sglang_pair import WAYS, route_pair

has_router = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="sglang_router is not installed"
)


@has_router
@pytest.mark.parametrize("policy", POLICIES)
def test_sglangs_router_routes_to_two_servers_and_counts_agree(policy: str) -> None:
    target = Target("fleet", "--engine", "sglang", "--workers", "2", "--base-port", "0")
    try:
        route(target, Path(sys.executable), policy)
    finally:
        target.stop()


@has_router
@pytest.mark.parametrize("way", WAYS)
def test_sglangs_router_joins_a_prefill_and_a_decode_server(way: str) -> None:
    route_pair(Path(sys.executable), way)

"""SGLang's router in front of two live SGLang servers, where it is installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from server.clients import Target
from server.sglang_clients import POLICIES, route


@pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="sglang_router is not installed"
)
@pytest.mark.parametrize("policy", POLICIES)
def test_sglangs_router_routes_to_two_servers_and_counts_agree(policy: str) -> None:
    target = Target("fleet", "--engine", "sglang", "--workers", "2", "--base-port", "0")
    try:
        route(target, Path(sys.executable), policy)
    finally:
        target.stop()

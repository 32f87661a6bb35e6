"""General advice names nothing that the run has or would refuse."""

from __future__ import annotations

from typing import Any

import pytest

import understudy
from replay.building import conversations
from understudy.engines.vllm_config import VllmConfig
from understudy.report.general_advice import advise_on_scattering, name_balancing_routing, name_more_tiers

GROUPS = (
    understudy.KvCacheGroup(kind="sliding_window", block_size=16, window=64),
    understudy.KvCacheGroup(kind="full", block_size=16),
)


BOTH = "Route by cached prefixes (--routing kv) or by session (--routing session_affinity)."


KV, SESSIONS = (
    "Route by cached prefixes (--routing kv).",
    "Route by session (--routing session_affinity).",
)


@pytest.mark.parametrize(
    ("groups", "routing", "host", "mode", "scattering", "tiers", "balance"),
    [
        ((), "round_robin", None, "", BOTH, "a host tier (--g2)", "least_loaded"),
        ((), "session_affinity", 20, "write_through", KV, "larger tiers", "least_loaded"),
        ((), "least_loaded", None, "", BOTH, "a host tier (--g2)", "kv"),
        (GROUPS, "round_robin", 90_000, "evict", BOTH, None, "least_loaded"),
        (GROUPS, "session_affinity", 90_000, "evict", KV, None, "least_loaded"),
        (GROUPS, "session_affinity", 90_000, "vllm", KV, None, "least_loaded"),
        (GROUPS, "least_loaded", 90_000, "evict", BOTH, None, "kv"),
        (GROUPS, "kv", None, "", SESSIONS, "a host tier (--g2)", "least_loaded"),
    ],
)
def test_general_advice_names_nothing_that_the_run_has_or_would_refuse(
    groups: tuple[understudy.KvCacheGroup, ...],
    routing: Any,
    host: int | None,
    mode: str,
    scattering: str,
    tiers: str | None,
    balance: str,
) -> None:
    engine = VllmConfig(num_gpu_blocks=600, kv_cache_groups=groups)
    below = {"tiers": [{"tier": "g2", "blocks": host}], "offload": {"mode": mode}, "kv_bytes_per_token": 1024}
    given = None if host is None else understudy.TiersConfig.from_dict(below)
    report = understudy.replay(conversations(30), engine, workers=2, routing=routing, tiers=given)
    assert advise_on_scattering(report).startswith(scattering)
    assert name_more_tiers(report) == tiers
    assert name_balancing_routing(report) == balance

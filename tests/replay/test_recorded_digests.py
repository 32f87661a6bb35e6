"""Runs keep their results from change to change: what a rebuilding may not alter, as digests recorded before it.

A change that is meant to alter results records them anew (`python tests/replay/test_recorded_digests.py`) in a
commit of its own that says why.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from model.replay_gen import REQUEST_COLUMNS, random_case
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig

RECORDED = Path(__file__).parents[1] / "golden" / "digests" / "replay.json"
COLUMNS = (*REQUEST_COLUMNS, "itl_ns", "itl_count")
PLAIN = range(80)
TIERED = range(40)


def digest_of(seed: int, tiers: TiersConfig | None = None) -> str:
    case = random_case(seed, **_changes(seed, tiered=tiers is not None))
    how: dict[str, Any] = {} if tiers is None else {"tiers": tiers}
    timeline = run_offline(RunPlan(case.workload, case.config, **case.how, **how)).timeline
    value = hashlib.sha256(repr((timeline.steps, timeline.evictions, timeline.stored_blocks)).encode())
    for name in COLUMNS:
        value.update(repr((name, getattr(timeline, name).tolist())).encode())
    return value.hexdigest()[:16]


def _changes(seed: int, tiered: bool) -> dict[str, Any]:
    """Settings that every version of vLLM takes."""
    config = random_case(seed).config
    changes: dict[str, Any] = {"async_scheduling": False, "watermark": min(config.watermark, 0.5)}
    if config.max_num_batched_tokens is not None and config.max_num_seqs is not None:
        changes["max_num_seqs"] = min(config.max_num_seqs, config.max_num_batched_tokens)
    if tiered:
        changes |= {"enable_prefix_caching": True}
    return changes


def _tiers(seed: int) -> TiersConfig:
    settings: dict[str, Any] = {
        "kv_bytes_per_token": 1 << 14,
        "tiers": [
            {
                "tier": "g2",
                "blocks": 8 + 3 * (seed % 17),
                "link": {"down_gbps": 0.1 * (1 + seed % 5), "up_gbps": 0.3},
            }
        ],
        "offload": {"mode": ("evict", "write_through")[seed % 2]},
    }
    if seed % 4 == 3:
        settings["tiers"].append({"tier": "g3", "blocks": 400, "link": {"backend_down_gbps": 0.2}})
    return msgspec.convert(settings, TiersConfig)


@pytest.mark.parametrize("seed", PLAIN)
def test_a_run_gives_what_it_gave(seed: int) -> None:
    assert digest_of(seed) == json.loads(RECORDED.read_text())["plain"][seed]


@pytest.mark.parametrize("seed", TIERED)
def test_a_run_with_tiers_gives_what_it_gave(seed: int) -> None:
    assert digest_of(seed, _tiers(seed)) == json.loads(RECORDED.read_text())["tiered"][seed]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    digests = {"plain": [digest_of(s) for s in PLAIN], "tiered": [digest_of(s, _tiers(s)) for s in TIERED]}
    RECORDED.write_text(json.dumps(digests, indent=1) + "\n")

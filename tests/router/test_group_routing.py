"""KV-aware routing with several KV cache groups: a hit is what all groups can serve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import understudy as us
from replay.building import conversations
from understudy.errors import ConfigError
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan

WINDOW = us.KvCacheGroup(kind="sliding_window", block_size=16, window=64)
FULL = us.KvCacheGroup(kind="full", block_size=16)
WIDE = us.KvCacheGroup(kind="full", block_size=32)
CHUNK = us.KvCacheGroup(kind="chunked_local", block_size=16, chunk=128)
STATE = us.KvCacheGroup(kind="mamba", block_size=64)

GROUPS = {
    "window": (WINDOW, FULL),
    "two windows": (WINDOW, FULL, WINDOW),
    "wide": (WINDOW, WIDE),
    "chunk": (CHUNK, FULL),
    "state": (STATE, us.KvCacheGroup(kind="full", block_size=64)),
}


def run(
    groups: tuple[us.KvCacheGroup, ...], routing: us.KvRouting | None = None, **settings: Any
) -> OfflineRun:
    settings = {"num_gpu_blocks": settings.pop("blocks", 3000), "max_num_batched_tokens": 8192, **settings}
    engine = us.VllmConfig(kv_cache_groups=groups, **settings)
    return run_offline(
        RunPlan(conversations(16), engine, workers=3, routing=routing or us.KvRouting(), check=True)
    )


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("retention", [0, None])
def test_the_router_predicts_the_hits_of_all_groups(
    groups: tuple[us.KvCacheGroup, ...], retention: int | None
) -> None:
    found = run(groups, prefix_cache_retention_interval=retention)
    decisions = found.decisions
    assert decisions is not None
    # A prediction counts whole prompts; an engine computes at least the last token again.
    predicted = decisions.overlap_blocks * found.timeline.block_size
    actual = found.timeline.cached_tokens_first[decisions.rows]
    assert actual.sum() > 0
    assert (predicted >= actual).all()
    alike = predicted == actual
    assert alike.mean() > 0.9
    assert np.array_equal(decisions.overlap_blocks, decisions.true_overlap_blocks)


def test_evicted_windows_are_unlearned() -> None:
    found = run((WINDOW, FULL), blocks=100)
    decisions = found.decisions
    assert decisions is not None
    assert found.timeline.evictions > 0
    assert found.facts.router["mean_cost_regret_blocks"] == 0


def test_an_index_of_the_first_group_alone_regrets_its_choices() -> None:
    everything, first = run((WINDOW, FULL)), run((WINDOW, FULL), us.KvRouting(index_groups="first"))
    assert first.facts.router["predicted_hit"] < everything.facts.router["predicted_hit"]
    assert first.facts.router["best_hit"] > first.facts.router["predicted_hit"]
    assert first.facts.router["mean_cost_regret_blocks"] > 0
    assert everything.facts.router["mean_cost_regret_blocks"] == 0
    assert first.facts.router["actual_hit"] < everything.facts.router["actual_hit"]


def test_without_prefix_caching_groups_of_any_sizes_are_routed_without_hits() -> None:
    wide_window = us.KvCacheGroup(kind="sliding_window", block_size=32, window=128)
    found = run((wide_window, FULL), enable_prefix_caching=False)
    assert found.facts.router["predicted_hit"] == 0


def test_an_index_of_the_first_group_skips_groups_that_are_not_cached() -> None:
    ring = us.KvCacheGroup(kind="circular", block_size=8)
    found = run((ring, FULL), us.KvRouting(index_groups="first"))
    assert found.facts.router["predicted_hit"] > 0
    assert found.facts.router["mean_cost_regret_blocks"] == 0


def test_one_group_is_routed_the_same_with_either_index() -> None:
    load = conversations(12)
    engine = us.VllmConfig(block_size=16, num_gpu_blocks=2000)
    digests = {
        run_offline(RunPlan(load, engine, workers=3, routing=us.KvRouting(index_groups=which))).facts.digest
        for which in ("all", "first")
    }
    assert len(digests) == 1


def test_delayed_events_of_groups_are_predicted_late() -> None:
    late = run((WINDOW, FULL), us.KvRouting(event_delay_ms=2000.0))
    assert late.facts.router["predicted_hit"] < late.facts.router["best_hit"]


def test_fast_forward_routes_as_stepping_does() -> None:
    engine = us.VllmConfig(kv_cache_groups=(WINDOW, FULL), num_gpu_blocks=1500)
    load = conversations(16)
    fast, slow = (
        run_offline(RunPlan(load, engine, workers=3, routing=us.KvRouting(), fast_forward=fast, events=True))
        for fast in (True, False)
    )
    assert fast.facts.digest == slow.facts.digest
    assert fast.facts.digests == slow.facts.digests


def test_an_unknown_choice_of_groups_is_an_error() -> None:
    with pytest.raises(ConfigError, match="index_groups must be all or first"):
        us.KvRouting(index_groups="second")  # type: ignore[arg-type]

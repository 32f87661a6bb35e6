"""Memory that a run leaves is for the next one, which never sees what was in it."""

from __future__ import annotations

from typing import Any

import pytest

import understudy.memory
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.memory import release_spare_memory, require_memory
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import Fixed, SyntheticSpec, Workload, synthesise

BLOCKS = 4096
"""Enough that slots, indices and orders of a worker are worth keeping, and few enough that they are used."""


def requests(sessions: int, seed: int) -> Workload:
    spec = SyntheticSpec(
        sessions=sessions, prompt_tokens=Fixed(2000), output_tokens=Fixed(20), content_seed=seed
    )
    return synthesise(spec)


def digests(workload: Workload, how: dict[str, Any]) -> object:
    """Of every part of a run's record."""
    engine = VllmConfig(
        block_size=4,
        num_gpu_blocks=how.get("blocks", BLOCKS),
        eviction_policy=how.get("eviction"),
        max_num_batched_tokens=4096,
    )
    link = {"down_gbps": 50, "up_gbps": 50}
    below = [{"tier": tier, "blocks": 4 * BLOCKS, "link": link} for tier in how.get("below", ())]
    config = {"kv_bytes_per_token": 1024, "tiers": below, "offload": {"mode": "write_through"}}
    tiers = TiersConfig.from_dict(config) if below else None
    threads = how.get("threads", 1)
    return run_offline(
        RunPlan(workload, engine, workers=how["workers"], tiers=tiers, threads=threads)
    ).facts.digests


HOWS: tuple[dict[str, Any], ...] = (
    {"workers": 1},
    {"workers": 3, "below": ("g2",)},
    {"workers": 5, "below": ("g2", "g3")},
    {"workers": 2, "eviction": "multi_lru"},
    {"workers": 4, "below": ("g2",), "threads": 2},
    {"workers": 2, "eviction": "lineage", "below": ("g2", "g3", "g4")},
)


def test_runs_in_memory_of_others_give_what_they_give_in_memory_of_their_own() -> None:
    cases = [(requests(40 + 30 * (i % 2), i), how) for i, how in enumerate(HOWS)]
    fresh = []
    for workload, how in cases:
        release_spare_memory()
        fresh.append(digests(workload, how))
    assert release_spare_memory()
    for order in (range(len(cases)), reversed(range(len(cases)))):
        for i in order:
            assert digests(*cases[i]) == fresh[i]


def test_what_is_kept_goes_back_to_the_system_when_it_is_asked_for() -> None:
    digests(requests(20, 0), HOWS[2])
    assert release_spare_memory()
    assert not release_spare_memory()


def test_what_is_empty_for_the_better_part_is_not_kept() -> None:
    release_spare_memory()
    few = requests(1, 0)
    digests(few, {"workers": 2, "blocks": 200_000, "below": ("g2",)})
    assert not release_spare_memory()


def test_a_run_that_seems_not_to_fit_gets_the_memory_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    digests(requests(20, 0), HOWS[2])
    free = iter((10**9, 3 * 10**9))
    monkeypatch.setattr(understudy.memory, "available_bytes", lambda: next(free))
    require_memory("it", 2 * 10**9, "less")
    monkeypatch.setattr(understudy.memory, "available_bytes", lambda: 10**9)
    with pytest.raises(ConfigError, match=r"it would take about 2\.0 GB of memory, and 1\.0 GB are free"):
        require_memory("it", 2 * 10**9, "less")

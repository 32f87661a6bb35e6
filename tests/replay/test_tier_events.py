"""The events of a run with tiers: one stream a worker over all its tiers, and one for each tier that the run shares."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from understudy._core import Tier
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument
from understudy.events import Stored
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig
from understudy.workload import Fixed, Poisson, SyntheticSpec, SystemPrompts, synthesise

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.workload import Workload

TIERS: dict[str, Any] = {
    "kv_bytes_per_token": 1000,
    "tiers": [{"tier": "g2", "blocks": 40}, {"tier": "g3", "blocks": 60}, {"tier": "g4", "blocks": 100}],
}


def busy_workload() -> Workload:
    """Prompts that share heads and do not fit in 24 blocks of 16."""
    spec = SyntheticSpec(
        sessions=60,
        prompt_tokens=Fixed(64),
        output_tokens=Fixed(12),
        arrivals=Poisson(qps=30.0),
        prefixes=SystemPrompts(groups=4, tokens=96),
        trace_block_size=16,
    )
    return synthesise(spec)


def tiered_run(**changes: Any) -> OfflineRun:
    engine = VllmConfig(block_size=16, num_gpu_blocks=24)
    return run_offline(
        RunPlan(
            busy_workload(), engine, workers=2, tiers=TiersConfig.from_dict(TIERS), events=True, **changes
        )
    )


def test_an_index_fed_by_the_streams_knows_what_every_tier_has_at_the_end() -> None:
    run = tiered_run(check=True)
    assert run.kv is not None
    assert run.timeline.tiers is not None
    resident: dict[Tier, int] = dict.fromkeys(Tier, 0)
    streams = [run.kv.events(worker, "consolidated") for worker in range(2)]
    streams += [run.kv.shared_events(tier, "consolidated") for tier in (Tier.G3, Tier.G4)]
    for stream in streams:
        here: set[tuple[Tier, int]] = set()
        last_ns = 0
        for position, (time_ns, event) in enumerate(stream):
            assert event.event_id == position
            assert time_ns >= last_ns
            last_ns = time_ns
            keys = {(event.tier, block.sequence_hash) for block in event.blocks}
            if isinstance(event, Stored):
                assert not keys & here
                here |= keys
            else:
                assert keys <= here
                here -= keys
        for tier, _ in here:
            resident[tier] += 1
    for summary in run.timeline.tiers.tiers:
        assert resident[summary.tier] == summary.resident_blocks > 0, summary.tier


def test_a_shared_tier_never_speaks_in_a_workers_stream() -> None:
    run = tiered_run()
    assert run.kv is not None
    for worker in range(2):
        assert {event.tier for _, event in run.kv.events(worker, "raw")} == {Tier.G1, Tier.G2}
    assert {event.tier for _, event in run.kv.shared_events(Tier.G3, "raw")} == {Tier.G3}


def test_the_file_names_the_publisher_and_is_in_order_of_time(tmp_path: Path) -> None:
    run = tiered_run()
    assert run.kv is not None
    run.kv.write(events=tmp_path / "events.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {line.get("publisher", line.get("worker")) for line in lines} == {0, 1, "G3", "G4"}
    times = [line["time_ns"] for line in lines]
    assert times == sorted(times)
    assert {line["tier"] for line in lines} == {"G1", "G2", "G3", "G4"}


def test_a_tier_that_the_run_does_not_share_has_no_stream() -> None:
    run = tiered_run()
    assert run.kv is not None
    with pytest.raises(InvalidArgument, match="G2"):
        run.kv.shared_events(Tier.G2, "raw")

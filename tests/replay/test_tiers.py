"""Tiers from settings to the columns of a run."""

from __future__ import annotations

import numpy as np
import pytest

import understudy
from replay.building import conversations, crowd, single_turns
from replay.tier_scene import ENGINE, config, played
from understudy._core import Tier
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TierPlan, to_core

# --- columns ------------------------------------------------------------------------------------------------------


def test_a_prompt_that_was_evicted_comes_back_from_the_host() -> None:
    # 20 and 50 blocks do not fit into 60: the second evicts the first, which then returns.
    workload = single_turns(
        [320, 800, 320], arrival_ms=[0, 500, 1500], content=[range(20), range(100, 150), range(20)]
    )
    timeline = played(workload, config())
    assert timeline.tiers is not None
    on_host, *lower = timeline.tiers.below_tokens_first
    assert timeline.cached_tokens_first.tolist() == [0, 0, 304]  # one token is left to compute
    assert on_host.tolist() == [0, 0, on_host[2]]
    assert 0 < on_host[2] <= 304
    assert not np.any(lower)
    assert timeline.tiers.parked_ns[2] > 0
    assert len(timeline.tiers.onboard_ns) == 1
    assert [summary.tier for summary in timeline.tiers.tiers] == [Tier.G1, Tier.G2]
    without = played(workload)
    assert without.tiers is None
    assert without.cached_tokens_first[2] < 304


def test_an_unlimited_tier_holds_all_that_the_workload_can_fill() -> None:
    workload = single_turns([320, 800], output_tokens=8, arrival_ms=[0, 500])
    timeline = played(workload, config({"tier": "g2", "blocks": "unlimited"}))
    assert timeline.tiers is not None
    assert timeline.tiers.tiers[1].capacity_blocks == 21 + 51


def test_an_empty_workload_has_room_for_one_block() -> None:
    plan = TierPlan.of(config({"tier": "g2", "blocks": "unlimited"}), 16)
    assert plan is not None
    assert to_core(plan, 0) is not None
    assert played(single_turns([]), config({"tier": "g2", "blocks": "unlimited"})).tiers is not None


@pytest.mark.parametrize(
    ("link", "limits", "load_ms"),
    [
        ({}, (np.inf, np.inf), 31.0),
        ({"up_gbps": 0.5}, (np.inf, 0.5), 41.0),
        ({"down_gbps": 0.5}, (0.5, np.inf), 31.0),
        ({"down_gbps": 0.25, "up_gbps": 0.5}, (0.25, 0.5), 41.0),
    ],
)
def test_a_workers_link_to_a_shared_tier_may_be_limited_in_one_direction(
    link: dict[str, float], limits: tuple[float, float], load_ms: float
) -> None:
    """Worker 1 loads ten blocks of 1 MB that worker 0 computed: up to the host at 1 GB/s or less, and again to G1."""
    workload = single_turns([161, 161], arrival_ms=[0, 1000], content=[range(11), range(11)])
    host = {"tier": "g2", "blocks": 20, "link": {"down_gbps": 1, "up_gbps": 1}}
    disk = {
        "tier": "g3",
        "blocks": 20,
        "latency_ms": 11.0,
        "link": {"backend_down_gbps": 1, "backend_up_gbps": 1, **link},
    }
    offload = {"mode": "write_through", "recompute_fallback": False}
    timeline = played(workload, config(host, disk, offload=offload, kv_bytes_per_token=62500), workers=2)
    assert timeline.tiers is not None
    links = {used.name: used for used in timeline.tiers.links}
    assert (links["worker 1 g2_to_g3"].bandwidth_gbps, links["worker 1 g3_to_g2"].bandwidth_gbps) == limits
    assert timeline.tiers.parked_ns.tolist() == [0, load_ms * 1e6]  # the latency once, whichever link has it


@pytest.mark.parametrize("mode", ["evict", "write_through"])
def test_host_tiers_leave_workers_independent_so_threads_change_nothing(mode: str) -> None:
    tiers = config(offload={"mode": mode})
    digests = {
        run_offline(RunPlan(crowd(), ENGINE, workers=3, tiers=tiers, threads=threads)).facts.digest
        for threads in (1, 3)
    }
    assert len(digests) == 1


def test_a_shared_tier_refuses_threads() -> None:
    tiers = config({"tier": "g2", "blocks": 9}, {"tier": "g3", "blocks": 99})
    with pytest.raises(ConfigError, match=r"threads > 1 needs independent workers.*no tier that they share"):
        run_offline(RunPlan(crowd(), ENGINE, workers=2, tiers=tiers, threads=2))


def test_the_digest_covers_where_prompts_came_from() -> None:
    fast, slow = (
        run_offline(
            RunPlan(crowd(), ENGINE, tiers=config({"tier": "g2", "blocks": 400, "link": {"up_gbps": gbps}}))
        )
        for gbps in (25, 0.05)
    )
    assert fast.facts.digest != slow.facts.digest
    again = run_offline(
        RunPlan(crowd(), ENGINE, tiers=config({"tier": "g2", "blocks": 400, "link": {"up_gbps": 25}}))
    )
    assert again.facts.digest == fast.facts.digest


def test_sessions_with_all_four_tiers_conserve_blocks() -> None:
    tiers = config(
        {"tier": "g2", "blocks": 40, "link": {"duplex_gbps": 20, "fixed_us": 5}},
        {"tier": "g3", "blocks": 300, "latency_ms": 0.05, "link": {"down_gbps": 9, "up_gbps": 9}},
        {"tier": "g4", "blocks": "unlimited", "latency_ms": 0.2, "eviction": "fifo"},
        offload={"offload_batch_size": 4, "demand_first": True, "min_reuse": 0},
    )
    timeline = played(conversations(), tiers, workers=2)
    assert timeline.completed.all()
    assert timeline.tiers is not None
    assert [summary.tier for summary in timeline.tiers.tiers] == [Tier.G1, Tier.G2, Tier.G3, Tier.G4]
    assert all(link.bytes_started == link.bytes_finished for link in timeline.tiers.links)


def test_a_comparison_plays_the_same_workload_without_tiers() -> None:
    report = understudy.replay(crowd(), ENGINE, tiers=config(), compare_without_tiers=True)
    bare = understudy.replay(crowd(), ENGINE)
    assert report.without_tiers is not None
    assert report.without_tiers.run.digest == bare.run.digest
    assert report.without_tiers.tiers is None
    with pytest.raises(ConfigError, match="compare_without_tiers needs tiers"):
        understudy.replay(
            "nowhere.jsonl", ENGINE, compare_without_tiers=True
        )  # known before anything is read


@pytest.mark.parametrize("num_gpu_blocks", [40, 55])
def test_fast_forward_changes_nothing_when_a_head_waits_whose_hits_may_be_evicted(
    num_gpu_blocks: int,
) -> None:
    # Without a reserve for the whole prompt, a head that loses its hits may need less room than before.
    engine = VllmConfig(
        block_size=16, num_gpu_blocks=num_gpu_blocks, max_num_batched_tokens=32, vllm_version="v0.18"
    )
    tiers = config(
        {"tier": "g2", "blocks": "unlimited", "link": {"fixed_us": 500}}, offload={"mode": "write_through"}
    )
    digests = {
        run_offline(RunPlan(crowd(), engine, tiers=tiers, fast_forward=fast_forward)).facts.digest
        for fast_forward in (True, False)
    }
    assert len(digests) == 1


def test_a_tier_takes_memory_for_what_it_is_filled_with() -> None:
    """64 workers with hosts of a thousand million blocks, and a disk: hundreds of GB if they were paid for."""
    huge = 10**9
    link = {"down_gbps": 25, "up_gbps": 25}
    tiers = config({"tier": "g2", "blocks": huge, "link": link}, {"tier": "g3", "blocks": huge, "link": link})
    small = config({"tier": "g2", "blocks": 4000, "link": link}, {"tier": "g3", "blocks": 4000, "link": link})
    runs = [run_offline(RunPlan(crowd(60), ENGINE, workers=64, tiers=given)) for given in (tiers, small)]
    capacities = [
        {t.tier: t.capacity_blocks for t in run.timeline.tiers.tiers} for run in runs if run.timeline.tiers
    ]
    assert capacities[0][Tier.G2] == 64 * huge
    assert capacities[0][Tier.G3] == huge
    columns = [(run.timeline.finish_ns.tolist(), run.timeline.cached_tokens_total.tolist()) for run in runs]
    assert columns[0] == columns[1]

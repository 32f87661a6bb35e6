"""Tiers from settings to the columns of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import understudy
from replay.building import conversations, crowd, single_turns
from understudy._core import Tier
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, PolicyError
from understudy.kv import EvictionPolicy
from understudy.run.layers import index_tiers_by_name
from understudy.run.offline import run_offline
from understudy.run.settings import ReplaySettings
from understudy.tiers import TierPlan, TiersConfig, to_core

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from understudy.run.timeline import Timeline
    from understudy.workload import Workload

ENGINE = VllmConfig(block_size=16, num_gpu_blocks=60)


def config(*tiers: dict[str, Any], **settings: Any) -> TiersConfig:
    given = tiers or ({"tier": "g2", "blocks": 400, "link": {"down_gbps": 25, "up_gbps": 25}},)
    return TiersConfig.from_dict({"tiers": list(given), "kv_bytes_per_token": 1024, **settings})


def played(workload: Workload, tiers: TiersConfig | None = None, **how: Any) -> Timeline:
    return run_offline(workload, ENGINE, tiers=tiers, check=True, **how).timeline


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
        run_offline(crowd(), ENGINE, workers=3, tiers=tiers, threads=threads).facts.digest
        for threads in (1, 3)
    }
    assert len(digests) == 1


def test_a_shared_tier_refuses_threads() -> None:
    tiers = config({"tier": "g2", "blocks": 9}, {"tier": "g3", "blocks": 99})
    with pytest.raises(ConfigError, match=r"threads > 1 needs independent workers.*no tier that they share"):
        run_offline(crowd(), ENGINE, workers=2, tiers=tiers, threads=2)


def test_the_digest_covers_where_prompts_came_from() -> None:
    fast, slow = (
        run_offline(crowd(), ENGINE, tiers=config({"tier": "g2", "blocks": 400, "link": {"up_gbps": gbps}}))
        for gbps in (25, 0.05)
    )
    assert fast.facts.digest != slow.facts.digest
    again = run_offline(crowd(), ENGINE, tiers=config({"tier": "g2", "blocks": 400, "link": {"up_gbps": 25}}))
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


# --- policies -------------------------------------------------------------------------------------------------------


class Nothing:
    """Copies no block."""

    def select(self, lineages: list[int], reuse: Any) -> Sequence[bool]:  # noqa: ARG002
        return [False] * len(lineages)


def test_a_filter_that_wants_nothing_leaves_the_host_empty() -> None:
    timeline = played(crowd(), config(offload={"filter": Nothing}))
    assert timeline.tiers is not None
    assert timeline.tiers.totals.offloaded_blocks == 0
    assert timeline.tiers.tiers[1].stored_blocks == 0
    bare = played(crowd())
    assert timeline.finish_ns.tolist() == bare.finish_ns.tolist()


def test_a_filter_is_made_once_a_run_and_sees_hashes_and_reuse() -> None:
    made = []

    class Watching:
        def __init__(self) -> None:
            made.append(self)
            self.asked: list[tuple[int, Any]] = []

        def select(self, lineages: list[int], reuse: Any) -> Sequence[bool]:
            assert len(lineages) == len(reuse)
            assert all(isinstance(lineage, int) for lineage in lineages)
            self.asked.append((len(lineages), reuse.tolist()))
            return [True] * len(lineages)

    tiers = config(offload={"filter": Watching})
    first = run_offline(crowd(), ENGINE, workers=2, tiers=tiers)
    second = run_offline(crowd(), ENGINE, workers=2, tiers=tiers)
    assert len(made) == 2
    assert made[0].asked == made[1].asked != []
    assert first.facts.digest == second.facts.digest
    assert first.facts.tiers["offload"]["filter"].endswith("Watching")
    plain = run_offline(crowd(), ENGINE, workers=2, tiers=config())
    assert plain.facts.digest == first.facts.digest


def test_a_filter_that_answers_for_others_is_an_error() -> None:
    class Short(Nothing):
        def select(self, lineages: list[int], reuse: Any) -> Sequence[bool]:  # noqa: ARG002
            return [True] * (len(lineages) + 1)

    with pytest.raises(PolicyError, match="asked about"):
        played(crowd(), config(offload={"filter": Short}))


def test_what_a_filter_raises_ends_the_run() -> None:
    class Raising(Nothing):
        def select(self, lineages: list[int], reuse: Any) -> Sequence[bool]:  # noqa: ARG002
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        played(crowd(), config(offload={"filter": Raising}))


def test_an_object_that_is_no_filter_is_refused() -> None:
    with pytest.raises(ConfigError, match="filter must be a class that implements OffloadPolicy"):
        config(offload={"filter": Nothing()})
    with pytest.raises(ConfigError, match=r"offload.filter returned .*no select"):
        played(crowd(), config(offload={"filter": dict}))


def test_loads_fail_at_the_rate_that_is_set_and_the_prompts_are_computed() -> None:
    slow_compute = {"recompute_fallback": False}
    broken = played(crowd(), config(offload={"onboard_failure_rate": 1.0, **slow_compute}))
    sound = played(crowd(), config(offload=slow_compute))
    assert broken.tiers is not None
    assert sound.tiers is not None
    assert broken.tiers.totals.failed_loads == broken.tiers.totals.onboards > 0
    assert sound.tiers.totals.failed_loads == 0
    assert np.any(sound.tiers.below_tokens_total)
    assert broken.completed.all()
    with pytest.raises(ConfigError, match=r"onboard_failure_rate must be in \[0, 1\]"):
        config(offload={"onboard_failure_rate": 1.5})


def test_a_block_whose_load_failed_did_not_come_from_below() -> None:
    # Somebody else may have computed it meanwhile: then it is a hit on the device.
    timeline = played(crowd(), config(offload={"onboard_failure_rate": 1.0, "recompute_fallback": False}))
    assert timeline.tiers is not None
    assert not np.any(timeline.tiers.below_tokens_total)


# --- settings -------------------------------------------------------------------------------------------------------


def test_a_file_lists_tiers_and_single_settings_win_over_it(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "workers: 2\n"
        "kv_bytes_per_token: 131072\n"
        "offload: {mode: write_through, offload_batch_size: 8}\n"
        "tiers:\n"
        "  - tier: g2\n"
        "    bytes: 512GiB\n"
        "    link: {down_gbps: 55, up_gbps: 50}\n"
        "  - tier: g3\n"
        "    blocks: 1000\n"
    )
    settings = ReplaySettings.read(path, {}, [])
    host, disk = settings.tiers.tiers
    assert (host.bytes, host.blocks, host.link.down_gbps) == (512 * 2**30, None, 55)
    assert (disk.tier, disk.blocks) == ("g3", 1000)
    assert (settings.tiers.offload.mode, settings.tiers.offload.offload_batch_size) == ("write_through", 8)

    flags = {"tiers": {"g2": {"blocks": 7, "link": {"up_gbps": 9}}}, "model": "Llama-3.1-8B"}
    assignments = ["tiers.g3.latency_ms=2", "offload.mode=evict", "tiers.g2.link.down_gbps=inf"]
    settings = ReplaySettings.read(path, flags, assignments)
    host, disk = settings.tiers.tiers
    assert (host.bytes, host.blocks) == (None, 7)
    assert (host.link.down_gbps, host.link.up_gbps) == (float("inf"), 9)
    assert (disk.blocks, disk.latency_ms) == (1000, 2)
    assert (settings.tiers.kv_bytes_per_token, settings.tiers.model) == (None, "Llama-3.1-8B")
    assert (settings.tiers.offload.mode, settings.tiers.offload.offload_batch_size) == ("evict", 8)

    only = ReplaySettings.read(path, {}, ["tiers=[{tier: g2, blocks: 3}]"])
    assert [tier.blocks for tier in only.tiers.tiers] == [3]
    for nothing in ("tiers=[]", "tiers=null"):
        assert ReplaySettings.read(path, {}, [nothing]).tiers.tiers == ()


@pytest.mark.parametrize(
    ("layer", "match"),
    [
        ({"tiers": [{"tier": "g2"}, {"tier": "g2"}]}, "g2 is given more than once"),
        ({"tiers": [5]}, r"tiers\[0\] must be settings"),
        ({"tiers": [{"blocks": 5}]}, r"tiers\[0\] must be settings with tier"),
        ({"tiers": 5}, "tiers must be a list"),
        ({"tiers": {"g2": {"tier": "g3"}}}, "tiers.g2 must be settings of g2"),
        ({"tiers": {"g2": 5}}, "tiers.g2 must be settings of g2"),
    ],
)
def test_tiers_that_are_no_list_of_tiers_are_refused(layer: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        index_tiers_by_name(layer)


# --- Dynamo's names -------------------------------------------------------------------------------------------------


def test_a_run_takes_dynamos_engine_arguments() -> None:
    engine = VllmConfig.from_dict(
        {
            "block_size": 16,
            "num_gpu_blocks": 60,
            "kv_cache_bytes_per_token": 1024,
            "native_host_offload": {
                "num_host_blocks": 400,
                "d2h_bandwidth_gbps": 25,
                "h2d_bandwidth_gbps": 25,
            },
        }
    )
    theirs = understudy.replay(crowd(), engine)
    ours = understudy.replay(crowd(), ENGINE, tiers=config(offload={"mode": "write_through"}))
    assert theirs.run.digest == ours.run.digest
    assert theirs.run.tiers == ours.run.tiers
    assert theirs.run.engine == ours.run.engine
    assert theirs.tiers is not None

    staged = VllmConfig.from_dict(
        {
            "block_size": 16,
            "num_gpu_blocks": 60,
            "kv_bytes_per_token": 1024,
            "num_g2_blocks": 100,
            "num_g3_blocks": 500,
            "offload_batch_size": 4,
            "bandwidth_g1_to_g2_gbps": 20,
        }
    )
    report = understudy.replay(conversations(), staged, workers=2)
    assert report.tiers is not None
    assert [tier.tier for tier in report.tiers.tiers] == ["g1", "g2", "g3"]


def test_tiers_given_twice_are_refused_and_a_weight_may_stand_with_the_engine() -> None:
    named = VllmConfig.from_dict({"num_g2_blocks": 5, "kv_bytes_per_token": 1})
    with pytest.raises(ConfigError, match="tiers are given twice"):
        run_offline(crowd(), named, tiers=config())
    weighed = VllmConfig.from_dict({"kv_bytes_per_token": 1024})
    host = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 5}]})
    run = run_offline(crowd(), weighed, tiers=host)
    assert run.facts.tiers["kv_bytes_per_token"] == 1024
    with pytest.raises(ConfigError, match="kv_bytes_per_token is given twice"):
        run_offline(crowd(), weighed, tiers=TiersConfig.from_dict({"model": "Qwen3-8B"}))
    with pytest.raises(ConfigError, match="tiers: not a setting of engine"):
        VllmConfig.from_dict({"tiers": []})


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


def test_a_tier_may_evict_by_a_class_of_ones_own_on_every_worker() -> None:
    made = []

    class Oldest(EvictionPolicy):
        """First freed, first evicted."""

        def __init__(self) -> None:
            made.append(self)
            self._order: dict[int, None] = {}

        def on_freed(self, blocks: Any, lineage_hashes: Any) -> None:  # noqa: ARG002
            self._order.update(dict.fromkeys(blocks.tolist()))

        def on_taken(self, blocks: Any) -> None:
            for block in blocks.tolist():
                self._order.pop(block, None)

        def select(self, count: int) -> Sequence[int]:
            return list(self._order)[:count]

    host = {"tier": "g2", "blocks": 30}
    run = run_offline(crowd(), ENGINE, workers=3, tiers=config({**host, "eviction": Oldest}))
    assert len(made) == 3
    fifo = run_offline(crowd(), ENGINE, workers=3, tiers=config({**host, "eviction": "fifo"}))
    assert run.timeline.completed.all()
    assert run.timeline.tiers is not None
    assert fifo.timeline.tiers is not None
    assert run.timeline.tiers.tiers[1].evicted_blocks > 0
    shared = config(host, {"tier": "g3", "blocks": 50, "eviction": Oldest})
    for _ in range(2):  # a plan serves many runs
        assert run_offline(crowd(), ENGINE, workers=2, tiers=shared).timeline.completed.all()


@pytest.mark.parametrize("num_gpu_blocks", [40, 55])
def test_leaping_changes_nothing_when_a_head_waits_whose_hits_may_be_evicted(num_gpu_blocks: int) -> None:
    # Without a reserve for the whole prompt, a head that loses its hits may need less room than before.
    engine = VllmConfig(
        block_size=16, num_gpu_blocks=num_gpu_blocks, max_num_batched_tokens=32, vllm_version="v0.18"
    )
    tiers = config(
        {"tier": "g2", "blocks": "unlimited", "link": {"fixed_us": 500}}, offload={"mode": "write_through"}
    )
    digests = {
        run_offline(crowd(), engine, tiers=tiers, fast_forward=fast_forward).facts.digest
        for fast_forward in (True, False)
    }
    assert len(digests) == 1


def test_a_tier_takes_memory_for_what_it_is_filled_with() -> None:
    """64 workers with hosts of a thousand million blocks, and a disk: hundreds of GB if they were paid for."""
    huge = 10**9
    link = {"down_gbps": 25, "up_gbps": 25}
    tiers = config({"tier": "g2", "blocks": huge, "link": link}, {"tier": "g3", "blocks": huge, "link": link})
    small = config({"tier": "g2", "blocks": 4000, "link": link}, {"tier": "g3", "blocks": 4000, "link": link})
    runs = [run_offline(crowd(60), ENGINE, workers=64, tiers=given) for given in (tiers, small)]
    capacities = [
        {t.tier: t.capacity_blocks for t in run.timeline.tiers.tiers} for run in runs if run.timeline.tiers
    ]
    assert capacities[0][Tier.G2] == 64 * huge
    assert capacities[0][Tier.G3] == huge
    columns = [(run.timeline.finish_ns.tolist(), run.timeline.cached_tokens_total.tolist()) for run in runs]
    assert columns[0] == columns[1]

"""Fleets whose workers are not all alike: pools with engines and tiers of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

import understudy
from replay.building import ONE_MS, crowd, single_turns
from understudy._core import Tier
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, InvalidArgument
from understudy.events import Stored
from understudy.events.file import read_columns
from understudy.report import Report
from understudy.report.verdicts import find_verdicts
from understudy.router import FleetView, KvEventBatch, KvRouting, Router, RouteRequest
from understudy.run.digest import digests
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.pools import WorkerPool, name_pools
from understudy.run.run_plan import RunPlan
from understudy.run.settings import ReplaySettings
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop

if TYPE_CHECKING:
    from pathlib import Path

SMALL = VllmConfig(block_size=16, num_gpu_blocks=20, timing=ONE_MS)
LARGE = VllmConfig(block_size=16, num_gpu_blocks=200, timing=Constant(prefill_ms=0.0, decode_ms=2.0))
HOST = TiersConfig.from_dict(
    {
        "kv_bytes_per_token": 1 << 14,
        "tiers": [{"tier": "g2", "blocks": 50, "link": {"down_gbps": 1, "up_gbps": 1}}],
    }
)


class Fixed(Router):
    """Sends every request where it is told."""

    def __init__(self, *workers: int) -> None:
        self.workers = workers
        self.pools: list[int] = []

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        self.pools = view.pools.tolist()
        return self.workers[request.row]


def test_one_pool_is_a_fleet_of_workers_that_are_alike() -> None:
    pools = [WorkerPool(engine=SMALL, workers=3)]
    one = run_offline(RunPlan(crowd(40), pools=pools, routing="least_loaded"))
    assert one.facts == run_offline(RunPlan(crowd(40), SMALL, workers=3, routing="least_loaded")).facts


def test_each_pool_has_its_own_engine_and_workers_are_numbered_through_them() -> None:
    router = Fixed(0, 1, 2)
    pools = [WorkerPool(engine=SMALL, workers=2), WorkerPool(engine=LARGE, name="large")]
    run = run_offline(RunPlan(single_turns([10, 10, 10], 4), pools=pools, routing=router))
    assert router.pools == [0, 0, 1]
    assert (run.timeline.finish_ns // 1_000_000).tolist() == [4, 4, 8]
    assert run.timeline.worker_blocks.tolist() == [20, 20, 200]
    assert [pool.name for pool in run.facts.pools] == ["workers", "large"]


def test_a_request_is_rejected_by_the_pool_that_would_serve_it() -> None:
    pools = [WorkerPool(engine=SMALL), WorkerPool(engine=LARGE)]
    run = run_offline(RunPlan(single_turns([400, 400, 4000], 1), pools=pools, routing=Fixed(0, 1, 1)))
    assert run.timeline.worker.tolist() == [-1, 1, -1]
    assert "num_gpu_blocks=20" in run.timeline.reject_reasons[0]
    assert "num_gpu_blocks=200" in run.timeline.reject_reasons[2]


def test_pools_may_have_tiers_or_none() -> None:
    pools = [WorkerPool(engine=SMALL, workers=2, tiers=HOST), WorkerPool(engine=SMALL)]
    run = run_offline(RunPlan(crowd(60), pools=pools))
    alone = run_offline(RunPlan(crowd(60), SMALL, workers=3))
    third = run.timeline.worker == 2
    assert third.any()
    assert (run.timeline.finish_ns[third] == alone.timeline.finish_ns[third]).all()
    assert run.timeline.tiers is not None


@pytest.mark.parametrize("fast_forward", [True, False])
@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_pools_with_a_tier_of_the_run_each_keep_their_own(routing: str, fast_forward: bool) -> None:
    shared = TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 1 << 14,
            "tiers": [
                {"tier": "g2", "blocks": 30, "link": {"down_gbps": 1, "up_gbps": 1}},
                {"tier": "g3", "blocks": 300, "link": {"backend_down_gbps": 1, "backend_up_gbps": 1}},
            ],
        }
    )
    pools = [WorkerPool(engine=SMALL, workers=2, tiers=shared), WorkerPool(engine=LARGE, tiers=HOST)]
    run = run_offline(RunPlan(crowd(60), pools=pools, routing=routing, fast_forward=fast_forward, check=True))  # type: ignore[arg-type]
    assert (run.timeline.finish_ns >= 0).all()


@pytest.mark.parametrize(
    "how", [{"routing": "least_loaded"}, {"load": ClosedLoop(2)}], ids=["seen", "closed"]
)
def test_links_stand_in_the_order_of_workers_whether_pools_fast_forward_or_step(how: dict[str, Any]) -> None:
    pools = [
        WorkerPool(engine=SMALL, workers=2, tiers=HOST, name="a"),
        WorkerPool(engine=SMALL, tiers=HOST, name="b"),
    ]
    forwarded, stepped = (
        run_offline(RunPlan(crowd(40), pools=pools, fast_forward=fast_forward, **how))
        for fast_forward in (True, False)
    )
    for run in (forwarded, stepped):
        assert run.timeline.tiers is not None
        assert [link.name.split(" g")[0] for link in run.timeline.tiers.links[::2]] == [
            "worker 0",
            "worker 1",
            "worker 2",
        ]
    assert forwarded.facts.digest == stepped.facts.digest


def disk(blocks: int, gbps: float) -> TiersConfig:
    link = {"down_gbps": gbps, "up_gbps": gbps}
    backend = {"backend_down_gbps": gbps, "backend_up_gbps": gbps}
    return TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 1 << 14,
            "tiers": [
                {"tier": "g2", "blocks": 15, "link": link},
                {"tier": "g3", "blocks": blocks, "link": backend},
            ],
        }
    )


def two_disks(*names: str, routing: str | Router = "round_robin", **how: Any) -> OfflineRun:
    """Two workers with a large disk of theirs, and one of another pool with a small and slow one."""
    engines, workers, disks = [SMALL, SMALL], [2, 1], [disk(300, 1), disk(40, 0.5)]
    pools = [
        WorkerPool(engine=engine, workers=count, tiers=below, name=name or "workers")
        for engine, count, below, name in zip(engines, workers, disks, names or ("fast", "slow"), strict=True)
    ]
    return run_offline(RunPlan(crowd(90), pools=pools, routing=routing, **how))  # type: ignore[arg-type]


def test_the_tiers_of_each_pool_stand_by_themselves() -> None:
    tiers = two_disks().timeline.tiers
    assert tiers is not None
    assert [(s.pool, s.tier, s.capacity_blocks) for s in tiers.tiers] == [
        ("fast", Tier.G1, 40),
        ("fast", Tier.G2, 30),
        ("fast", Tier.G3, 300),
        ("slow", Tier.G1, 20),
        ("slow", Tier.G2, 15),
        ("slow", Tier.G3, 40),
    ]
    for summary in tiers.tiers:
        if summary.tier == Tier.G3:
            _, blocks = summary.residency
            assert 0.9 * summary.resident_blocks < blocks.max() <= summary.capacity_blocks
            assert summary.stored_blocks - summary.evicted_blocks == summary.resident_blocks
    fast, slow = (summary.residency[1].tolist() for summary in tiers.tiers if summary.tier == Tier.G3)
    assert max(slow) <= 40 < max(fast)


@pytest.mark.parametrize("routing", ["round_robin", "least_loaded", "kv"])
def test_each_pools_shared_tier_is_a_publisher_of_its_own(routing: str, tmp_path: Path) -> None:
    run = two_disks(routing=routing, events=True, check=True)
    assert run.kv is not None
    assert run.timeline.tiers is not None
    for summary in run.timeline.tiers.tiers:
        if summary.tier != Tier.G3:
            continue
        here: set[int] = set()
        for _, event in run.kv.shared_events(Tier.G3, "consolidated", summary.pool):
            told = {block.sequence_hash for block in event.blocks}
            assert not here & told if isinstance(event, Stored) else told <= here
            here ^= told
        assert len(here) == summary.resident_blocks > 0
    with pytest.raises(InvalidArgument, match="'fast', 'slow'"):
        run.kv.shared_events(Tier.G3, "raw")
    with pytest.raises(InvalidArgument, match="'other'"):
        run.kv.shared_events(Tier.G3, "raw", "other")
    names = ["worker 0", "worker 1", "worker 2", "fast G3", "slow G3"]
    assert [name for name, _ in run.kv.digests()] == names
    run.kv.write(events=tmp_path / "events.jsonl", raw_events=tmp_path / "raw.npz")
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert {line.get("publisher", line.get("worker")) for line in lines} == {0, 1, 2, "fast G3", "slow G3"}
    assert list(read_columns(tmp_path / "raw.npz").publishers) == names


def test_a_digest_covers_the_shared_tier_of_every_pool() -> None:
    """Without the first pool's disk nothing else of it would differ: its blocks are never asked for."""
    whole = two_disks(events=True)
    assert whole.timeline.tiers is not None
    base = digests(whole.timeline)["digests"]["tiers"]
    for at, summary in enumerate(whole.timeline.tiers.tiers):
        if summary.tier == Tier.G3:
            others = tuple(s for i, s in enumerate(whole.timeline.tiers.tiers) if i != at)
            tiers = replace(whole.timeline.tiers, tiers=others)
            assert digests(replace(whole.timeline, tiers=tiers))["digests"]["tiers"] != base


def test_the_report_names_the_tiers_and_links_of_pools(tmp_path: Path) -> None:
    report = Report.build(two_disks().timeline)
    assert report.tiers is not None
    uses = {use.tier: use for use in report.tiers.tiers}
    assert list(uses) == ["fast g1", "fast g2", "fast g3", "slow g1", "slow g2", "slow g3"]
    assert all(0 < use.resident_mean <= use.resident_max <= 1 for use in uses.values())
    assert sum(use.hit_ratio_first for use in uses.values()) == pytest.approx(
        report.prefix_hit_ratio.first_admission
    )
    links = {link.name: link for link in report.tiers.links}
    assert len(links) == len(report.tiers.links)
    assert set(links) == {
        f"{pool} {way}"
        for pool in ("fast", "slow")
        for way in (
            *("g1_to_g2", "g2_to_g1", "g2_to_g3", "g3_to_g2"),
            *("g2_to_g3_backend", "g3_to_g2_backend"),
        )
    }
    assert [
        (links[f"{pool} g1_to_g2"].links, links[f"{pool} g1_to_g2"].bandwidth_gbps)
        for pool in ("fast", "slow")
    ] == [
        (2, 1.0),
        (1, 0.5),
    ]
    assert all(0 <= link.utilisation_max <= 1 for link in links.values() if link.bandwidth_gbps < 2)
    report.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    table = StringIO()
    report.print(Console(file=table, width=200))
    for name in ("fast G3", "slow G3", "fast G2 → G3 backend", "fast G1 → G2 × 2", "slow G1 → G2"):
        assert name in page
        assert name in table.getvalue()


def test_a_router_counts_on_the_disk_of_a_workers_own_pool_alone() -> None:
    """A prompt that one pool's disk has is nothing to the other's worker, until it has been there too."""
    prompts = [[*range(8 * at, 8 * at + 8)] for at in range(4)]
    order = [0, 1, 2, 3, 0, 0]  # small devices forget the first of them
    workload = single_turns(
        [128] * 6, arrival_ms=[400 * at for at in range(6)], content=[prompts[which] for which in order]
    )
    engine = VllmConfig(block_size=16, num_gpu_blocks=9, timing=ONE_MS)
    pools = [WorkerPool(engine=engine, tiers=disk(300, 1)) for _ in range(2)]
    router = KvRouting(disk_cache_hit_weight=1.0, host_cache_hit_weight=1.0).build(
        imposed=np.array([0, 0, 0, 0, 1, 0], np.int32)
    )
    run_offline(RunPlan(workload, pools=pools, routing=router, check=True, events=True))
    held = router.decisions.overlap_blocks + router.decisions.lower_overlap_blocks
    assert held[4] == 0
    assert held[5] == 8


def test_a_router_is_told_whose_shared_tier_it_is() -> None:
    told: set[tuple[int | None, int]] = set()

    class Listening(Fixed):
        def observe(self, batch: KvEventBatch) -> None:
            told.add((batch.worker, batch.pool))

    two_disks(routing=Listening(*[row % 3 for row in range(90)]))
    assert told == {(0, 0), (1, 0), (2, 1), (None, 0), (None, 1)}


def test_the_device_of_pools_without_tiers_is_a_tier_too() -> None:
    pools = [WorkerPool(engine=SMALL, tiers=HOST, name="small"), WorkerPool(engine=LARGE, name="large")]
    report = Report.build(run_offline(RunPlan(crowd(60), pools=pools)).timeline)
    assert report.tiers is not None
    assert [(use.tier, use.capacity_blocks) for use in report.tiers.tiers] == [
        ("small g1", 20),
        ("small g2", 50),
        ("large g1", 200),
    ]
    assert all(0 < use.resident_max <= 1 for use in report.tiers.tiers)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["a", "b"], ["a", "b"]),
        (["workers", "workers"], ["pool 0", "pool 1"]),
        (["pool 1", "workers", "workers"], ["pool 0", "pool 1", "pool 2"]),
        (["pool 0", "b"], ["pool 0", "b"]),
        (["workers"], [""]),
    ],
)
def test_pools_are_told_apart(given: list[str], told: list[str]) -> None:
    assert name_pools([WorkerPool(name=name) for name in given]) == told


@pytest.mark.parametrize(
    "pools",
    [
        [WorkerPool(engine=SMALL), WorkerPool(engine=VllmConfig(block_size=32))],
        [WorkerPool(engine=SMALL), "large"],
    ],
)
def test_pools_that_make_no_fleet_are_refused(pools: list[WorkerPool]) -> None:
    with pytest.raises(ConfigError, match="pools"):
        run_offline(RunPlan(crowd(5), pools=pools))


def test_pools_and_an_engine_beside_them_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave engine"):
        run_offline(RunPlan(crowd(5), SMALL, pools=[WorkerPool()]))


def test_a_file_may_list_pools(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "routing: least_loaded\n"
        "pools:\n"
        "  - {name: small, workers: 2, engine: {block_size: 16, num_gpu_blocks: 20}}\n"
        "  - name: large\n"
        "    engine: {block_size: 16, num_gpu_blocks: 200}\n"
        "    kv_bytes_per_token: 16384\n"
        "    tiers: [{tier: g2, blocks: 50, link: {down_gbps: 1, up_gbps: 1}}]\n"
    )
    settings = ReplaySettings.read(path, {}, [])
    assert [(pool.name, pool.workers) for pool in settings.pools] == [("small", 2), ("large", 1)]
    run = run_offline(RunPlan(crowd(40), pools=settings.pools, routing=settings.policy))
    assert run.timeline.worker_blocks.tolist() == [20, 20, 200]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("workers: 2\npools: [{}]", "pools have their own workers"),
        ("gpu: {name: H100}\npools: [{}]", "^gpu: .*; leave gpu out, and give the engine of each pool"),
        ("pools: 3", "pools must be a list"),
        ("pools: [{size: 3}]", r"pools\[0\].size is not known"),
        ("pools: [{workers: 0}]", "workers"),
        (
            "pools: [{}]\nrouting: least_loaded\nrouter: {event_delay_ms: 5}",
            "event_delay_ms is for routing kv, but routing is least_loaded",
        ),
        ("pools: [{}]\nrouter: {}", "router is for routing kv, but routing is round_robin"),
    ],
)
def test_pools_of_a_file_that_make_no_sense_are_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        ReplaySettings.read(path, {}, [])


def test_blanks_around_the_name_of_a_pool_do_not_count() -> None:
    assert name_pools([WorkerPool(name=" a"), WorkerPool(name="a")]) == ["pool 0", "pool 1"]
    with pytest.raises(ConfigError, match="name must be text"):
        WorkerPool(name=5)  # type: ignore[arg-type]


def test_verdicts_know_the_tiers_that_the_workers_of_a_pool_share() -> None:
    shared = TiersConfig.from_dict(
        {
            "kv_bytes_per_token": 1 << 10,
            "tiers": [{"tier": "g2", "blocks": 60, "link": {}}, {"tier": "g3", "blocks": 4000, "link": {}}],
        }
    )
    engine = VllmConfig(block_size=16, num_gpu_blocks=40, timing=ONE_MS)
    content = [[1000 * (i // 8) + k for k in range(9)] for i in range(64)]
    workload = single_turns([144] * 64, [4] * 64, [40 * i for i in range(64)], content)
    pools = [WorkerPool(engine=engine, workers=2, tiers=shared, name=name) for name in ("a", "b")]
    rules = [
        verdict.rule
        for verdict in find_verdicts(understudy.replay(workload, pools=pools, routing="round_robin"))
    ]
    assert "cache_too_small" in rules
    assert "scattered_prefixes" not in rules

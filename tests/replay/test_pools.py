"""Fleets whose workers are not all alike: pools with engines and tiers of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replay.building import ONE_MS, crowd, single_turns
from understudy.engines.config import VllmConfig
from understudy.engines.timing import Constant
from understudy.errors import ConfigError
from understudy.router import FleetView, Router, RouteRequest
from understudy.run.offline import run_offline
from understudy.run.pools import WorkerPool
from understudy.run.settings import ReplaySettings
from understudy.tiers import TiersConfig

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
    one = run_offline(crowd(40), pools=pools, routing="least_loaded")
    assert one.facts == run_offline(crowd(40), SMALL, workers=3, routing="least_loaded").facts


def test_each_pool_has_its_own_engine_and_workers_are_numbered_through_them() -> None:
    router = Fixed(0, 1, 2)
    pools = [WorkerPool(engine=SMALL, workers=2), WorkerPool(engine=LARGE, name="large")]
    run = run_offline(single_turns([10, 10, 10], 4), pools=pools, routing=router)
    assert router.pools == [0, 0, 1]
    assert (run.timeline.finish_ns // 1_000_000).tolist() == [4, 4, 8]
    assert run.timeline.worker_blocks.tolist() == [20, 20, 200]
    assert [pool["name"] for pool in run.facts["pools"]] == ["workers", "large"]


def test_a_request_is_rejected_by_the_pool_that_would_serve_it() -> None:
    pools = [WorkerPool(engine=SMALL), WorkerPool(engine=LARGE)]
    run = run_offline(single_turns([400, 400, 4000], 1), pools=pools, routing=Fixed(0, 1, 1))
    assert run.timeline.worker.tolist() == [-1, 1, -1]
    assert "num_gpu_blocks=20" in run.timeline.reject_reasons[0]
    assert "num_gpu_blocks=200" in run.timeline.reject_reasons[2]


def test_pools_may_have_tiers_or_none() -> None:
    pools = [WorkerPool(engine=SMALL, workers=2, tiers=HOST), WorkerPool(engine=SMALL)]
    run = run_offline(crowd(60), pools=pools)
    alone = run_offline(crowd(60), SMALL, workers=3)
    third = run.timeline.worker == 2
    assert third.any()
    assert (run.timeline.finish_ns[third] == alone.timeline.finish_ns[third]).all()
    assert run.timeline.tiers is not None


@pytest.mark.parametrize("leaping", [True, False])
@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_pools_with_a_tier_of_the_run_each_keep_their_own(routing: str, leaping: bool) -> None:
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
    run = run_offline(crowd(60), pools=pools, routing=routing, leaping=leaping, check=True)  # type: ignore[arg-type]
    assert (run.timeline.finish_ns >= 0).all()


@pytest.mark.parametrize(
    "pools",
    [
        [WorkerPool(engine=SMALL), WorkerPool(engine=VllmConfig(block_size=32))],
        [WorkerPool(engine=SMALL), "large"],
    ],
)
def test_pools_that_make_no_fleet_are_refused(pools: list[WorkerPool]) -> None:
    with pytest.raises(ConfigError, match="pools"):
        run_offline(crowd(5), pools=pools)


def test_pools_and_an_engine_beside_them_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave engine"):
        run_offline(crowd(5), SMALL, pools=[WorkerPool()])


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
    run = run_offline(crowd(40), pools=settings.pools, routing=settings.policy)
    assert run.timeline.worker_blocks.tolist() == [20, 20, 200]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("workers: 2\npools: [{}]", "pools have workers of their own"),
        ("pools: 3", "pools must be a list"),
        ("pools: [{size: 3}]", r"pools\[0\].size is not known"),
        ("pools: [{workers: 0}]", "workers"),
    ],
)
def test_pools_of_a_file_that_make_no_sense_are_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        ReplaySettings.read(path, {}, [])

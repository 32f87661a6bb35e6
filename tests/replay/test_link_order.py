"""The links of a run have one order, however the run advanced its workers."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from replay.building import single_turns
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.run.offline import run_offline
from understudy.run.pools import WorkerPool
from understudy.run.run_plan import RunPlan
from understudy.tiers.settings import TiersConfig

TIMING = Constant(prefill_ms=2.0, decode_ms=1.0)
HOST = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 100}], "kv_bytes_per_token": 1000})
DISK = TiersConfig.from_dict(
    {"tiers": [{"tier": "g2", "blocks": 50}, {"tier": "g3", "blocks": 100}], "kv_bytes_per_token": 1000}
)
VLLM = VllmConfig(block_size=16, num_gpu_blocks=100, timing=TIMING)
SGLANG = SglangConfig(block_size=16, num_gpu_blocks=100, timing=TIMING)
POOLS = {
    "vllm": WorkerPool(name="vllm", engine=VLLM, workers=2, tiers=HOST),
    "sglang": WorkerPool(name="sglang", engine=SGLANG, workers=2, tiers=HOST),
    "disk": WorkerPool(name="disk", engine=VLLM, workers=1, tiers=DISK),
}
WAYS: list[dict[str, Any]] = [{}, {"fast_forward": False}, {"check": True}, {"keep_steps": True}]
ORDERS = [*permutations(["vllm", "sglang"]), *permutations(["vllm", "sglang", "disk"])]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("routing", ["round_robin", "least_loaded"])
def test_the_digest_does_not_depend_on_how_the_run_was_advanced(order: tuple[str, ...], routing: str) -> None:
    workload = single_turns([64] * 8, 5)
    pools = [POOLS[name] for name in order]
    ways = WAYS if routing != "round_robin" or "disk" in order else [*WAYS, {"threads": 2}]
    runs = [run_offline(RunPlan(workload, pools=pools, routing=routing, **way)) for way in ways]  # type: ignore[arg-type]
    names = [
        [link.name for link in run.timeline.tiers.links] for run in runs if run.timeline.tiers is not None
    ]
    assert len(names) == len(ways)
    assert all(one == names[0] for one in names)
    assert len({run.facts.digest for run in runs}) == 1


def test_links_of_workers_follow_shared_ones_in_the_order_of_workers() -> None:
    run = run_offline(
        RunPlan(single_turns([64] * 8, 5), pools=[POOLS["vllm"], POOLS["sglang"], POOLS["disk"]])
    )
    assert run.timeline.tiers is not None
    owners = [
        link.name.split()[1] if link.name.startswith("worker ") else "" for link in run.timeline.tiers.links
    ]
    assert owners == sorted(owners)
    assert set(owners) == {"", "0", "1", "2", "3", "4"}

"""Data-parallel ranks in a replay: engines of their own behind one front."""

from __future__ import annotations

import msgspec
import pytest

from replay.building import ONE_MS, crowd, play, single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.router.kv import KvRouting
from understudy.run.offline import run_offline
from understudy.run.pools import WorkerPool

TWO = VllmConfig(block_size=16, num_gpu_blocks=64, timing=ONE_MS, data_parallel_size=2)


def test_a_rank_is_an_engine_of_its_own_and_the_least_busy_gets_the_next() -> None:
    # The first two go to different ranks; the third finds rank 0 free again, and rank 1 busy.
    workload = single_turns([16, 16, 16], [2, 50, 2], arrival_ms=[0, 0.1, 20])
    run = play(workload, TWO)
    assert run.timeline.worker.tolist() == [0, 1, 0]
    assert run.timeline.num_workers == run.facts.workers == 2
    assert run.facts.data_parallel_size == 2


def test_ties_go_round() -> None:
    workload = single_turns([16] * 4, [1] * 4, arrival_ms=[0, 50, 100, 150])
    assert play(workload, TWO).timeline.worker.tolist() == [0, 1, 0, 1]
    old = msgspec.structs.replace(TWO, vllm_version="0.24")
    assert play(workload, old).timeline.worker.tolist() == [0, 0, 0, 0]


def test_deployments_are_chosen_by_the_fleet_and_ranks_by_their_front() -> None:
    workload = single_turns([16] * 4, [40] * 4, arrival_ms=[0, 1, 2, 3])
    workers = run_offline(workload, TWO, workers=2).timeline.worker.tolist()
    assert [worker // 2 for worker in workers] == [0, 1, 0, 1]
    assert sorted(workers) == [0, 1, 2, 3]


def test_a_kv_router_speaks_to_every_rank() -> None:
    run = run_offline(crowd(20), msgspec.structs.replace(TWO, num_gpu_blocks=400), routing=KvRouting())
    assert set(run.timeline.worker.tolist()) == {0, 1}


def test_one_rank_changes_nothing() -> None:
    one = msgspec.structs.replace(TWO, data_parallel_size=1)
    plain = VllmConfig(block_size=16, num_gpu_blocks=64, timing=ONE_MS)
    digests = [run_offline(crowd(20), engine, workers=2).facts.digest for engine in (one, plain)]
    assert digests[0] == digests[1]


def test_what_does_not_go_with_ranks_is_refused() -> None:
    workload = single_turns([16])
    with pytest.raises(ConfigError, match="data_parallel_size must be at least 1, got 0"):
        VllmConfig(data_parallel_size=0)
    pools = [WorkerPool(name=name, engine=TWO) for name in "ab"]
    with pytest.raises(ConfigError, match="needs a fleet of one pool"):
        run_offline(workload, pools=pools)
    with pytest.raises(ConfigError, match="session_affinity"):
        run_offline(workload, TWO, routing="session_affinity")

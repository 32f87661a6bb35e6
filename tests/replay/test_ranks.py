"""Data-parallel ranks in a replay: engines of their own behind one front."""

from __future__ import annotations

import msgspec
import pytest

from replay.building import ONE_MS, crowd, play, single_turns
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.router.kv import KvRouting
from understudy.run.offline import run_offline
from understudy.run.pools import WorkerPool
from understudy.run.run_plan import RunPlan

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


def test_every_rank_of_several_engines_is_a_worker_of_the_router() -> None:
    workload = single_turns([16] * 5, [40] * 5, arrival_ms=[0, 1, 2, 3, 4])
    assert run_offline(RunPlan(workload, TWO, workers=2)).timeline.worker.tolist() == [0, 1, 2, 3, 0]
    spread = run_offline(RunPlan(workload, TWO, routing="least_loaded")).timeline.worker.tolist()
    assert sorted(spread) == [0, 0, 0, 1, 1]


def test_a_session_stays_on_its_rank() -> None:
    run = run_offline(
        RunPlan(crowd(20), msgspec.structs.replace(TWO, num_gpu_blocks=400), routing="session_affinity")
    )
    assert set(run.timeline.worker.tolist()) == {0, 1}


def test_ranks_step_together_within_their_engine_only() -> None:
    # A decode of 30 tokens on each rank; then a prompt of 400 tokens on rank 0, whose step takes longer.
    timing = Constant(prefill_ms=50, decode_ms=1)
    engine = VllmConfig(block_size=16, num_gpu_blocks=256, timing=timing, data_parallel_size=2)
    workload = single_turns([16] * 5, [100] * 4 + [2], arrival_ms=[0, 0, 0, 0, 120])
    run = run_offline(RunPlan(workload, engine, workers=2, ranks=True, check=True))
    assert run.timeline.worker.tolist() == [0, 1, 2, 3, 0]
    last = run.timeline.last_token_ns.tolist()
    assert last[0] == last[1]  # ranks of one engine: both wait for the prompt
    assert last[2] == last[3]
    assert last[0] - last[2] == 50_000_000
    alone = run_offline(RunPlan(workload, engine, workers=2, check=True)).timeline.last_token_ns.tolist()
    assert alone[1] == alone[2] == alone[3] < alone[0]


def test_a_kv_router_speaks_to_every_rank() -> None:
    run = run_offline(
        RunPlan(crowd(20), msgspec.structs.replace(TWO, num_gpu_blocks=400), routing=KvRouting())
    )
    assert set(run.timeline.worker.tolist()) == {0, 1}


def test_one_rank_changes_nothing() -> None:
    one = msgspec.structs.replace(TWO, data_parallel_size=1)
    plain = VllmConfig(block_size=16, num_gpu_blocks=64, timing=ONE_MS)
    digests = [run_offline(RunPlan(crowd(20), engine, workers=2)).facts.digest for engine in (one, plain)]
    assert digests[0] == digests[1]


def test_what_does_not_go_with_ranks_is_refused() -> None:
    workload = single_turns([16])
    with pytest.raises(ConfigError, match="data_parallel_size must be at least 1, got 0"):
        VllmConfig(data_parallel_size=0)
    pools = [WorkerPool(name=name, engine=TWO) for name in "ab"]
    with pytest.raises(ConfigError, match="needs a fleet of one pool"):
        run_offline(RunPlan(workload, pools=pools))

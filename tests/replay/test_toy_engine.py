"""A toy engine that implements only the required calls of the interface runs through the public path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from engines.toy_kind import ToyConfig
from replay.building import single_turns
from understudy import _core
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.kind_names import KIND_MODULES
from understudy.router.kv import KvRouting
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.pools import WorkerPool
from understudy.run.run_plan import RunPlan
from understudy.workload import ClosedLoop

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.run.timeline import Timeline
    from understudy.workload import Workload

pytestmark = pytest.mark.skipif(
    not hasattr(_core, "ToyEngineConfig"), reason="built without UNDERSTUDY_TEST_ENGINES"
)


@pytest.fixture(autouse=True)
def toy_is_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KIND_MODULES, "toy", "engines.toy_kind")


COMPLETED, CANCELLED = 0, 2
TOY: dict[str, Any] = {"block_size": 16, "num_gpu_blocks": 4096, "timing": Constant(1.0, 1.0)}


def play(workload: Workload, *, workers: int = 2, queue_limit: int = 1000, **how: Any) -> Timeline:
    return run(workload, ToyConfig(**TOY, queue_limit=queue_limit), workers=workers, **how).timeline


def run(workload: Workload, engine: ToyConfig, **how: Any) -> OfflineRun:
    return run_offline(RunPlan(workload, engine, **how))


def burst(count: int = 40) -> Workload:
    return single_turns([32 + 16 * (row % 5) for row in range(count)], 6)


def times(timeline: Timeline) -> list[Any]:
    return [timeline.first_token_ns.tolist(), timeline.finish_ns.tolist(), timeline.worker.tolist()]


@pytest.mark.parametrize("how", [{}, {"threads": 2}, {"load": ClosedLoop(5)}, {"routing": "least_loaded"}])
def test_the_toy_engine_runs_and_fast_forward_changes_nothing(how: dict[str, Any]) -> None:
    timeline = play(burst(), **how)
    assert timeline.output_tokens.tolist() == [6] * 40
    assert times(timeline) == times(play(burst(), **how, fast_forward=False))


@pytest.mark.parametrize("check", [False, True])
def test_the_kv_router_follows_the_events_of_the_toy_engine(check: bool) -> None:
    timeline = play(burst(), workers=3, routing=KvRouting(), check=check)
    assert timeline.output_tokens.tolist() == [6] * 40
    assert len(set(timeline.worker.tolist())) == 3


@pytest.mark.parametrize(
    "how", [{}, {"load": ClosedLoop(30)}, {"routing": "least_loaded"}, {"fast_forward": False}]
)
def test_a_queue_limit_ends_a_waiting_request_inside_submit(how: dict[str, Any]) -> None:
    engine = ToyConfig(**TOY, queue_limit=3, max_running=2)
    timeline = run(burst(), engine, workers=1, check=True, **how).timeline
    assert set(timeline.status.tolist()) == {COMPLETED, CANCELLED}
    assert (timeline.output_tokens[timeline.status == CANCELLED] == 0).all()
    assert (timeline.finish_ns >= 0).all()


def test_a_fleet_has_pools_of_several_kinds() -> None:
    pools = [
        WorkerPool(engine=ToyConfig(**TOY, queue_limit=1000)),
        WorkerPool(engine=VllmConfig(block_size=64), workers=2),
    ]
    with pytest.raises(ConfigError, match="pools of one fleet need one block_size, got 16"):
        run_offline(RunPlan(burst(), pools=pools))
    sixteen = pools[1].engine.__class__(block_size=16)
    pools[1] = WorkerPool(engine=sixteen, workers=2)
    mixed = run_offline(RunPlan(burst(), pools=pools, routing="least_loaded"))
    assert mixed.timeline.output_tokens.tolist() == [6] * 40
    assert set(mixed.timeline.worker.tolist()) == {0, 1, 2}
    assert [pool.engine.get("queue_limit") for pool in mixed.facts.pools] == [1000, None]


def test_speedups_apply_to_engines_of_every_kind() -> None:
    fast = ToyConfig(**TOY, queue_limit=1000, mocker=MockerSettings(speedup_ratio=2.0))
    plain = play(burst(1), workers=1)
    assert run(burst(1), fast).timeline.finish_ns * 2 == plain.finish_ns


def test_settings_of_another_kind_are_described_in_the_facts() -> None:
    facts = run(burst(), ToyConfig(**TOY, queue_limit=1000)).facts
    assert (facts.scheduling, facts.engine["queue_limit"]) == ("synchronous", 1000)


def test_steps_are_recorded_only_of_engines_that_support_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record_steps: ToyConfig engines record no steps"):
        play(burst(), record_steps=tmp_path / "steps.jsonl")

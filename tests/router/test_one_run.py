"""A native router belongs to one run, or one caller, at a time; and what a run lends is gone when it ends."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from replay.building import single_turns
from understudy import _core
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import WrongState
from understudy.router.kv import KvRouting
from understudy.run.fleet_plan import FleetPlan
from understudy.run.offline import run_offline
from understudy.run.pools import WorkerPool
from understudy.run.run_plan import RunPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from understudy.router.kv import KvRouter

MESSAGE = "outer is in the middle of a call"
ENGINE = VllmConfig(num_gpu_blocks=100)

CALLS: dict[str, Callable[[KvRouter], object]] = {
    "begin": lambda router: router.begin(2),
    "add_worker": lambda router: router.add_worker(),
    "decide": lambda router: router.decide(0, [], 1, 1, 0.0),
    "release": lambda router: router.release(0.0),
    "ended": lambda router: router.ended(0),
    "index": lambda router: router.index,
    "decisions": lambda router: router.decisions,
    "another run": lambda router: play(router),
}


def play(router: Any, on_step_end: Callable[[int, int], None] | None = None) -> str:
    run = run_offline(
        RunPlan(single_turns([64] * 20, 8), ENGINE, workers=2, routing=router, on_step_end=on_step_end)
    )
    assert run.facts.digest is not None
    return run.facts.digest


@pytest.mark.parametrize("call", CALLS)
def test_a_router_that_serves_a_run_is_nobody_elses(call: str) -> None:
    router, refusals = KvRouting().build(0), []

    def meddle(_worker: int, _time_ns: int) -> None:
        with pytest.raises(WrongState, match=MESSAGE):
            CALLS[call](router)
        refusals.append(call)

    assert play(router, meddle) == play("kv")
    assert refusals
    play(router)  # it can serve another one afterwards


@pytest.mark.parametrize("name", ["kv", "random"])
def test_two_threads_do_not_share_one(name: str) -> None:
    router = KvRouting().build(0) if name == "kv" else _core.native_router(name, 0)
    refused: list[BaseException] = []

    def other() -> None:
        try:
            play(router)
        except WrongState as error:
            refused.append(error)

    def once(_worker: int, _time_ns: int) -> None:
        if not refused:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    play(router, once)
    assert len(refused) == 1


def test_an_index_outlives_the_workers_that_it_was_of() -> None:
    router = KvRouting().build(0)
    router.begin(2)
    index = router.index
    router.begin(3)
    index.check()
    del router
    index.check()


def test_an_engine_that_a_run_has_lent_is_gone_with_it() -> None:
    workload = single_turns([64] * 4, 8)
    fleet = FleetPlan([WorkerPool(engine=ENGINE)], workload, 1)
    pools = fleet.native(None, events=False, kv_trace=False, seed=0)
    kept: list[_core.VllmEngine] = []
    _core.run_fleet(
        workload,
        _core.FleetSettings(pools=pools, routing="round_robin"),
        on_step=lambda _worker, engine, _ended: kept.append(engine),
    )
    assert len(set(map(id, kept))) == 1
    with pytest.warns(RuntimeWarning, match="uninitialized"), pytest.raises(TypeError):
        kept[0].check()

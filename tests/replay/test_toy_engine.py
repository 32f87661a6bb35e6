"""A toy engine that implements only the required calls of the interface runs under every offline driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from replay.building import single_turns
from understudy import _core
from understudy.router.kv import KvRouting

if TYPE_CHECKING:
    from understudy.workload import Workload

pytestmark = pytest.mark.skipif(
    not hasattr(_core, "ToyEngineConfig"), reason="built without UNDERSTUDY_TEST_ENGINES"
)

COMPLETED, CANCELLED = 0, 2


def play(workload: Workload, *, workers: int = 2, engine: dict[str, Any] | None = None, **how: Any) -> Any:
    pool = _core.Pool(
        engine=_core.ToyEngineConfig(**(engine or {"queue_limit": 1000})),
        timing=_core.constant_timing(1.0, 1.0),
        workers=workers,
    )
    return _core.run_fleet(workload, _core.FleetSettings(pools=[pool], **how))


def burst(count: int = 40) -> Workload:
    return single_turns([32 + 16 * (row % 5) for row in range(count)], 6)


def times(result: Any) -> list[Any]:
    return [result.first_token_ns.tolist(), result.finish_ns.tolist(), result.worker.tolist()]


@pytest.mark.parametrize("how", [{}, {"threads": 2}, {"concurrency": 5}, {"routing": "least_loaded"}])
def test_the_toy_engine_runs_and_fast_forward_changes_nothing(how: dict[str, Any]) -> None:
    result = play(burst(), **how)
    assert result.output_tokens.tolist() == [6] * 40
    assert times(result) == times(play(burst(), **how, fast_forward=False))


@pytest.mark.parametrize("check", [False, True])
def test_the_kv_router_follows_the_events_of_the_toy_engine(check: bool) -> None:
    workload = burst()
    result = play(workload, workers=3, routing=KvRouting().build(0), check=check)
    assert result.output_tokens.tolist() == [6] * 40
    assert len(set(result.worker.tolist())) == 3


@pytest.mark.parametrize(
    "how", [{}, {"concurrency": 30}, {"routing": "least_loaded"}, {"fast_forward": False}]
)
def test_a_queue_limit_ends_a_waiting_request_inside_submit(how: dict[str, Any]) -> None:
    result = play(burst(), workers=1, engine={"queue_limit": 3, "max_running": 2}, check=True, **how)
    status = np.asarray(result.status)
    assert set(status.tolist()) == {COMPLETED, CANCELLED}
    assert (np.asarray(result.output_tokens)[status == CANCELLED] == 0).all()
    assert (np.asarray(result.finish_ns) >= 0).all()

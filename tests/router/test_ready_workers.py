"""Workers that may be chosen: every policy stays within `view.ready`, live and offline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from replay.building import ONE_MS, crowd, sessions
from understudy._core import NativeRouter, native_router
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import InvalidArgument, PolicyError
from understudy.router import KvRouting, Router
from understudy.router.dispatch import Decision, Dispatcher, LiveRouteRequest
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tokens import Identities

if TYPE_CHECKING:
    from understudy.router import FleetView, RouteRequest

ENGINE = VllmConfig(block_size=16, num_gpu_blocks=200, timing=ONE_MS)
POLICIES = ["round_robin", "random", "least_loaded", "power_of_two", "session_affinity"]


def built_in(name: str) -> NativeRouter:
    router = native_router(name, seed=1)
    assert router is not None
    return router


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_chooses_ready_workers_only(name: str) -> None:
    router = built_in(name)
    idle = [0] * 5
    chosen = {router.pick(row, row, idle, idle, [1, 4]) for row in range(50)}
    assert chosen <= {1, 4}
    assert len(chosen) == (1 if name in ("least_loaded", "session_affinity") else 2)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_chooses_alike_with_all_ready_and_without_the_list(name: str) -> None:
    one, other = built_in(name), built_in(name)
    rng = np.random.default_rng(3)
    for row in range(200):
        tokens = rng.integers(0, 50, 4).tolist()
        session = int(rng.integers(0, 20))
        assert one.pick(row, session, tokens, tokens) == other.pick(row, session, tokens, tokens, range(4))


def test_a_session_moves_when_its_worker_leaves_and_stays_there() -> None:
    router = built_in("session_affinity")
    idle = [0, 0, 0]
    assert router.pick(0, 7, idle, idle) == 0
    assert router.pick(1, 7, idle, [9, 0, 0]) == 0
    assert router.pick(2, 7, idle, [9, 5, 0], [1, 2]) == 2
    assert router.pick(3, 7, idle, [0, 0, 9]) == 2


@pytest.mark.parametrize("ready", [[], [3], [1, 1], [2, 0]])
def test_a_wrong_list_of_ready_workers_is_refused(ready: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="ready must have ids of workers"):
        built_in("round_robin").pick(0, 0, [0, 0, 0], [0, 0, 0], ready)


class Notes(Router):
    """Keeps what it saw of requests and workers."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int | None, str]] = []
        self.fleets: set[Any] = set()

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        self.requests.append((request.session, request.parent_session, request.stage))
        self.fleets.add((len(view), tuple(view.ready.tolist()), view.states, view.roles, tuple(view.pools)))
        return int(view.ready[-1])


def test_a_replay_shows_ids_states_roles_and_sessions() -> None:
    router = Notes()
    workload = sessions(*[[(20, 3, 0), (40, 3, 1), (60, 3, 1)]] * 4)
    run_offline(RunPlan(workload, ENGINE, workers=3, routing=router))
    assert router.fleets == {(3, (0, 1, 2), ("ready",) * 3, ("both",) * 3, (0, 0, 0))}
    assert sorted(router.requests) == [(row, None, "whole") for row in (0, 3, 6, 9) for _ in range(3)]


class OutOfRange(Router):
    def choose(self, request: RouteRequest, view: FleetView) -> int:  # noqa: ARG002
        return len(view)


def test_a_choice_that_is_not_ready_ends_the_replay() -> None:
    with pytest.raises(
        PolicyError, match=r"chose worker 3 for row 0, which is not ready; choose one of the 3"
    ):
        run_offline(RunPlan(crowd(3), ENGINE, workers=3, routing=OutOfRange()))


class First(Router):
    """Ignores `ready`."""

    def choose(self, request: RouteRequest, view: FleetView) -> int:  # noqa: ARG002
        return 0


def ask(dispatcher: Dispatcher, row: int) -> int:
    decisions: list[Decision] = []
    blocks = Identities.from_local_hashes([5, 6])
    dispatcher.dispatch(LiveRouteRequest(row, 0, 32, 4, 0, 16, blocks), decisions.append)
    dispatcher.ended(row)
    return decisions[0].worker


@pytest.mark.parametrize("policy", [*POLICIES, KvRouting()])
def test_a_live_worker_that_is_away_gets_nothing_until_it_is_back(policy: str | KvRouting) -> None:
    dispatcher = Dispatcher(policy)
    assert [dispatcher.add_worker() for _ in range(3)] == [0, 1, 2]
    dispatcher.set_available(1, False)
    assert {ask(dispatcher, row) for row in range(1, 40)} <= {0, 2}
    dispatcher.set_available(0, False)
    dispatcher.set_available(2, False)
    dispatcher.set_available(1, True)
    assert {ask(dispatcher, row) for row in range(40, 50)} == {1}
    assert dispatcher.add_worker() == 3


def test_a_live_router_that_chooses_a_worker_that_is_away_fails_its_request() -> None:
    dispatcher = Dispatcher(First())
    dispatcher.add_worker()
    dispatcher.add_worker()
    assert ask(dispatcher, 1) == 0
    dispatcher.set_available(0, False)
    with pytest.raises(PolicyError, match="chose worker 0, which is not ready; choose one of the 1 ids"):
        ask(dispatcher, 2)

"""Routers written in Python: what they are asked and told, and what they may answer."""

from __future__ import annotations

import runpy
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import understudy
from replay.building import MS, ONE_MS, crowd, single_turns
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError, PolicyError, WrongState
from understudy.router import KvRouting, Router
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.tiers import TiersConfig
from understudy.workload import ClosedLoop

if TYPE_CHECKING:
    from understudy.router import FleetView, KvEventBatch, RouteRequest

EXAMPLE = Path(__file__).parents[2] / "examples" / "python_router.py"
ENGINE = VllmConfig(block_size=16, num_gpu_blocks=200, timing=ONE_MS)


class LeastOutstanding(Router):
    """What least_loaded does."""

    def choose(self, request: RouteRequest, view: FleetView) -> int:  # noqa: ARG002
        return int(view.outstanding_tokens.argmin())


class Recorder(LeastOutstanding):
    """Keeps what it saw and was told."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.told: list[tuple[int, int | None, int]] = []

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        self.seen.append(
            (
                request.row,
                view.now_ns,
                view.outstanding_requests.tolist(),
                view.running.tolist(),
                view.waiting.tolist(),
                view.used_blocks.tolist(),
                len(self.told),
            )
        )
        return super().choose(request, view)

    def observe(self, batch: KvEventBatch) -> None:
        self.told.append((batch.time_ns, batch.worker, len(batch.events)))


@pytest.mark.parametrize("load", [None, ClosedLoop(5)])
def test_a_router_in_python_gives_what_the_native_one_gives(load: ClosedLoop | None) -> None:
    digests = {
        run_offline(RunPlan(crowd(80), ENGINE, workers=3, routing=routing, load=load)).facts.digest
        for routing in ("least_loaded", LeastOutstanding())
    }
    assert len(digests) == 1


def test_it_sees_each_request_when_it_comes_and_the_fleet_as_it_is_then() -> None:
    router = Recorder()
    workload = single_turns([20, 20, 20], [3, 5, 1], arrival_ms=[0, 1.5, 3.2])
    run_offline(RunPlan(workload, ENGINE, workers=2, routing=router))
    rows, times, requests, running, waiting, used, _ = zip(*router.seen, strict=True)
    assert rows == (0, 1, 2)
    assert times == (0, 3 * MS // 2, 32 * MS // 10)
    assert requests == ([0, 0], [1, 0], [0, 1])
    assert running == ([0, 0], [1, 0], [0, 1])
    assert waiting == ([0, 0], [0, 0], [0, 0])
    assert used == ([0, 0], [2, 0], [0, 2])


@pytest.mark.parametrize("fast_forward", [True, False])
def test_it_is_told_in_the_order_of_time_and_before_it_is_asked(fast_forward: bool) -> None:
    router = Recorder()
    run = run_offline(
        RunPlan(crowd(60), ENGINE, workers=3, routing=router, events=True, fast_forward=fast_forward)
    )
    assert router.told
    assert [time for time, *_ in router.told] == sorted(time for time, *_ in router.told)
    for _, now_ns, *_, told in router.seen:
        assert all(time <= now_ns for time, *_ in router.told[:told])
        assert all(time > now_ns for time, *_ in router.told[told:])
    # The run keeps all the same what it would keep without.
    plain = run_offline(
        RunPlan(
            crowd(60),
            ENGINE,
            workers=3,
            routing="least_loaded",
            events=True,
            fast_forward=fast_forward,
            keep_candidates=True,
        )
    )
    assert replace(plain.facts, routing="Recorder") == run.facts


def test_what_it_sees_and_is_told_is_the_same_fast_forward_or_stepping() -> None:
    routers = (Recorder(), Recorder())
    for router, fast_forward in zip(routers, (True, False), strict=True):
        run_offline(RunPlan(crowd(60), ENGINE, workers=3, routing=router, fast_forward=fast_forward))
    assert routers[0].seen == routers[1].seen
    assert routers[0].told == routers[1].told


def test_a_view_is_good_for_one_call() -> None:
    class Keeps(LeastOutstanding):
        views: list[FleetView]

        def choose(self, request: RouteRequest, view: FleetView) -> int:
            self.views = [view]
            return super().choose(request, view)

    router = Keeps()
    run_offline(RunPlan(single_turns([10]), ENGINE, routing=router))
    with pytest.raises(WrongState, match="one call"):
        _ = router.views[0].running


def test_also_for_one_that_raised() -> None:
    views: list[FleetView] = []

    class KeepsAndFails(Router):
        def choose(self, request: RouteRequest, view: FleetView) -> int:  # noqa: ARG002
            views.append(view)
            raise LookupError("nobody there")

    with pytest.raises(LookupError):
        run_offline(RunPlan(single_turns([10]), ENGINE, routing=KeepsAndFails()))
    for read in (lambda: views[0].running, lambda: views[0].outstanding_tokens, lambda: len(views[0])):
        with pytest.raises(WrongState, match="one call"):
            read()


@pytest.mark.parametrize("answer", [2, -1, None, "0"])
def test_an_answer_that_is_no_worker_is_an_error_that_says_so(answer: Any) -> None:
    class Wrong(Router):
        def choose(self, request: RouteRequest, view: FleetView) -> int:  # noqa: ARG002
            worker: int = answer
            return worker

    with pytest.raises(PolicyError, match="worker"):
        run_offline(RunPlan(single_turns([10]), ENGINE, workers=2, routing=Wrong()))


def test_what_a_router_raises_reaches_the_caller() -> None:
    class Fails(Router):
        def choose(self, request: RouteRequest, view: FleetView) -> int:  # noqa: ARG002
            raise LookupError("nobody there")

    with pytest.raises(LookupError, match="nobody there"):
        run_offline(RunPlan(single_turns([10]), ENGINE, routing=Fails()))


def test_an_object_that_cannot_choose_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose"):
        run_offline(RunPlan(single_turns([10]), ENGINE, routing=object()))  # type: ignore[arg-type]


# ── Once more without tiers ──

HOST = TiersConfig.from_dict({"tiers": [{"tier": "g2", "blocks": 50}], "kv_bytes_per_token": 100})


class Remembers(Router):
    """Goes by all that it was ever asked, and began with."""

    def __init__(self, asked: int = 0) -> None:
        self.asked = [asked]

    def choose(self, request: RouteRequest, view: FleetView) -> int:
        self.asked.append(request.row)
        return (sum(self.asked) + len(self.asked) // 7) % len(view)


def test_a_comparison_without_tiers_begins_with_the_router_as_it_was_given() -> None:
    router = Remembers(5)
    how: dict[str, Any] = {"engine": ENGINE, "workers": 3}
    both = understudy.replay(crowd(61), **how, routing=router, tiers=HOST, compare_without_tiers=True)
    alone = understudy.replay(crowd(61), **how, routing=Remembers(5))
    assert both.without_tiers is not None
    assert both.without_tiers.run.digest == alone.run.digest
    assert len(router.asked) == 1 + 61  # it is the first run's; a copy served the second


@pytest.mark.parametrize("built", [None, False, True])
def test_what_begins_anew_with_a_run_needs_no_copy(built: bool | None) -> None:
    kv = KvRouting(temperature=1.0)
    routing = "kv" if built is None else kv.build(3) if built else kv
    how: dict[str, Any] = {"engine": ENGINE, "workers": 3, "routing": routing, "seed": 3}
    both = understudy.replay(crowd(60), **how, tiers=HOST, compare_without_tiers=True)
    assert both.without_tiers is not None
    assert both.without_tiers.run.digest == understudy.replay(crowd(60), **how).run.digest


def test_a_router_that_cannot_be_copied_is_refused_before_it_is_asked() -> None:
    class Locked(Remembers):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    router = Locked()
    with pytest.raises(
        ConfigError, match=r"compare_without_tiers needs a copy of routing .*Locked.*__deepcopy__"
    ):
        understudy.replay(crowd(9), ENGINE, routing=router, tiers=HOST, compare_without_tiers=True)
    assert router.asked == [0]


def test_a_request_that_fits_nowhere_is_rejected_and_the_router_not_asked() -> None:
    router = Recorder()
    run = run_offline(RunPlan(single_turns([10, 5000, 10]), ENGINE, workers=2, routing=router))
    assert [row for row, *_ in router.seen] == [0, 2]
    assert run.timeline.worker.tolist() == [0, -1, 1]


def test_the_example_finds_more_than_round_robin(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    shares = [float(line.split()[1].rstrip("%")) for line in capsys.readouterr().out.splitlines()]
    assert shares[1] > shares[0]

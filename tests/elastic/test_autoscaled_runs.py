"""Runs whose workers join and leave."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from elastic.burst import ENGINE, burst, gpu_seconds, mean_ttft_s, run_burst, workload_of
from elastic.steps import Steps
from model.replay_gen import random_case
from understudy import VllmConfig
from understudy.cli import main
from understudy.engines.sglang_config import SglangConfig
from understudy.errors import ConfigError, PolicyError, WrongState
from understudy.run.autoscale import Autoscale
from understudy.run.disaggregation import Disaggregation
from understudy.run.offline import OfflineRun, run_offline
from understudy.run.pools import WorkerPool
from understudy.run.run_plan import RunPlan
from understudy.run.timeline import Status
from understudy.run.worker_lives import Life
from understudy.tiers.settings import TiersConfig

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.scaling.metrics import Decision, TickMetrics

SMALL = VllmConfig(block_size=16, num_gpu_blocks=200, max_num_seqs=8, max_num_batched_tokens=256)
ROUTERS = ["round_robin", "least_loaded", "power_of_two", "session_affinity", "kv"]


def run(arrivals_s: list[float], steps: Steps, engine: Any = SMALL, **how: Any) -> OfflineRun:
    startup_s = how.pop("startup_s", 0.0)
    workload = workload_of(arrivals_s, prompt=100, answer=40, block=16)
    return run_offline(
        RunPlan(workload, engine, autoscale=Autoscale(scaler=steps, startup_s=startup_s), check=True, **how)
    )


def lives_of(made: OfflineRun) -> list[tuple[float, int, str]]:
    lives = made.timeline.lives
    assert lives is not None
    return [
        (at / 1e9, int(worker), Life(int(state)).name.lower())
        for at, worker, state in zip(lives.life_ns, lives.life_worker, lives.life_state, strict=True)
    ]


# ── The burst of Dynamo's replay: one more worker every 25 s, and six of them 45 s after the burst ──


@pytest.mark.parametrize("target", ["throughput", "latency"])
def test_on_the_burst_the_native_planner_decides_at_the_ticks_of_dynamos_replay(target: str) -> None:
    made = run_burst(f"dynamo-load,optimization_target={target}")
    assert made.timeline.lives is not None
    assert [(one.at_ns / 1e9, one.decode) for one in made.timeline.lives.decisions] == [
        *((35.0, 2), (60.0, 3), (85.0, 4), (110.0, 5), (135.0, 6)),
        *((160.0, 5), (165.0, 4), (170.0, 3), (175.0, 2), (180.0, 1)),
    ]
    assert gpu_seconds(made) == pytest.approx(667, rel=0.01)
    assert mean_ttft_s(made) == pytest.approx(16.026, rel=0.02)
    assert made.timeline.completed.all()


# ── Lives ──


def test_a_worker_serves_only_between_its_start_and_its_drain() -> None:
    made = run([i / 10 for i in range(100)], Steps([(2000, None, 3), (6000, None, 1)]), startup_s=1.0)
    assert made.timeline.completed.all()
    assert lives_of(made)[:7] == [
        (0.0, 0, "ready"),
        (2.0, 1, "starting"),
        (2.0, 2, "starting"),
        (3.0, 1, "ready"),
        (3.0, 2, "ready"),
        (6.0, 2, "draining"),
        (6.0, 1, "draining"),
    ]
    joined = made.timeline.worker > 0
    assert joined.any()
    assert made.timeline.arrival_ns[joined].min() >= 3e9
    assert made.timeline.arrival_ns[joined].max() <= 6e9
    last = max(made.timeline.finish_ns[made.timeline.worker == worker].max() for worker in (1, 2))
    stopped = {worker: at for at, worker, state in lives_of(made) if state == "stopped"}
    assert stopped.keys() == {1, 2}
    assert max(stopped.values()) == pytest.approx(last / 1e9, abs=0.05)


def test_a_worker_that_is_still_starting_is_cancelled_at_once() -> None:
    made = run([0.0, 5.0], Steps([(1000, None, 2), (2000, None, 1)]), startup_s=60.0)
    assert lives_of(made) == [(0.0, 0, "ready"), (1.0, 1, "starting"), (2.0, 1, "stopped")]
    assert (made.timeline.worker == 0).all()


def test_requests_wait_for_a_worker_where_all_have_left() -> None:
    autoscale_to_none = Steps([(500, None, 0), (3000, None, 1)])
    workload = workload_of([1.0, 2.0, 2.5, 6.0], prompt=100, answer=4, block=16)
    plan = RunPlan(workload, SMALL, autoscale=_unlimited(autoscale_to_none), check=True)
    made = run_offline(plan)
    assert made.timeline.completed.all()
    # Arrivals are counted from the first request, at 1 s.
    assert made.timeline.arrival_ns.tolist() == [0, 10**9, 1_500_000_000, 5 * 10**9]
    assert made.timeline.first_admit_ns[1:3].min() >= 3 * 10**9


def test_a_run_that_no_scaler_brings_on_ends_with_an_error() -> None:
    workload = workload_of([1.0, 2.0], prompt=100, answer=4, block=16)
    with pytest.raises(WrongState, match="1 requests have not ended, 1 of them wait for a worker"):
        run_offline(RunPlan(workload, SMALL, autoscale=_unlimited(Steps([(500, None, 0)]))))


class _Unlimited(Autoscale, frozen=True):
    @property
    def is_limited(self) -> bool:
        return False


def _unlimited(steps: Steps) -> Autoscale:
    return _Unlimited(scaler=steps)


def test_a_worker_that_loads_its_weights_starts_later() -> None:
    assert Autoscale(startup_s=2, weights_gbps=8, weight_bytes=16 * 10**9).start_ns == 4 * 10**9
    with pytest.raises(ConfigError, match="weight_bytes"):
        _ = Autoscale(weights_gbps=8).start_ns


# ── Fast-forward, routers, tiers, pools ──


@pytest.mark.parametrize("seed", range(40))
def test_random_fleets_that_change_are_the_same_with_and_without_fast_forward(seed: int) -> None:
    rng = Random(f"elastic {seed}")
    case = random_case(seed)
    end_ms = max(1.0, float(case.workload.arrival_ns.max(initial=0)) / 1e6) * 1.5
    times = sorted({round(rng.uniform(0, end_ms), 3) for _ in range(rng.randint(1, 8))})
    steps = [(at, None, rng.randint(1, 5)) for at in times]
    how = case.how | {
        "routing": rng.choice(ROUTERS),
        "autoscale": Autoscale(scaler=Steps(steps), startup_s=rng.choice([0, 0.001, 0.3])),
        "check": True,
        "events": rng.random() < 0.3,
    }
    how.pop("threads", None)
    plan = RunPlan(case.workload, case.config, **how)
    made, stepped = run_offline(plan), run_offline(_stepwise(plan))
    assert made.facts.digest == stepped.facts.digest
    assert not (made.timeline.status == Status.UNFINISHED).any()
    _check_lives(made)


def _stepwise(plan: RunPlan) -> RunPlan:
    from dataclasses import replace

    return replace(plan, fast_forward=False)


def _check_lives(made: OfflineRun) -> None:
    """Every request was sent while its worker was ready, and ended before it stopped."""
    timeline, lives = made.timeline, made.timeline.lives
    assert lives is not None
    assert timeline.num_workers == len(lives.worker_pool)
    ready = dict.fromkeys(range(timeline.num_workers), -1)
    until = dict.fromkeys(range(timeline.num_workers), np.iinfo(np.int64).max)
    stopped = dict(until)
    for worker, at, state in zip(
        lives.life_worker.tolist(), lives.life_ns.tolist(), lives.life_state, strict=True
    ):
        if state == Life.READY:
            ready[worker] = at
        elif state == Life.DRAINING:
            until[worker] = at
        elif state == Life.STOPPED:
            stopped[worker] = at
    for row in np.flatnonzero(timeline.worker >= 0).tolist():
        worker = int(timeline.worker[row])
        assert ready[worker] >= 0
        assert ready[worker] <= max(timeline.queued_ns[row], timeline.arrival_ns[row])
        assert timeline.arrival_ns[row] <= until[worker]
        assert timeline.finish_ns[row] <= stopped[worker]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("routing", ["round_robin", "kv"])
def test_tiers_of_workers_that_leave(routing: Any, *, shared: bool) -> None:
    tiers = [{"tier": "g2", "blocks": 100}]
    tiers += [{"tier": "g3", "blocks": 400}] if shared else []
    arrivals = [i / 20 for i in range(200)]
    settings = TiersConfig.from_dict({"tiers": tiers, "kv_bytes_per_token": 1000})
    plan = {"tiers": settings, "routing": routing}
    made = run(arrivals, Steps([(1000, None, 4), (4000, None, 1), (6000, None, 3), (8000, None, 2)]), **plan)
    assert made.timeline.completed.all()
    assert made.timeline.num_workers == 6
    _check_lives(made)
    assert made.timeline.tiers is not None
    g2 = [one for one in made.timeline.tiers.tiers if int(one.tier) == 2]
    assert [one.capacity_blocks for one in g2] == [600]


def test_prefill_and_decode_workers_join_and_leave() -> None:
    steps = Steps([(1000, 3, 1), (2000, 2, 4), (4000, 1, 1), (5000, 2, 2)])
    split = Disaggregation(prefill_workers=1, decode_workers=2, kv_bytes_per_token=1000, link_gbps=1.0)
    made = run([i / 20 for i in range(140)], steps, disaggregation=split, startup_s=0.1)
    assert made.timeline.completed.all()
    lives = made.timeline.lives
    assert lives is not None
    assert lives.worker_pool.tolist() == [0, 1, 1, 0, 0, 1, 1, 1, 0, 1]
    _check_drained_in_order(made)


def _check_drained_in_order(made: OfflineRun) -> None:
    states: dict[int, list[str]] = {}
    for _, worker, state in lives_of(made):
        states.setdefault(worker, []).append(state)
    whole = ["starting", "ready", "draining", "stopped"]
    assert all(seen == whole[whole.index(seen[0]) :][: len(seen)] for seen in states.values())


def test_pools_of_one_role_count_together() -> None:
    pools = [WorkerPool(engine=SMALL, name="a"), WorkerPool(engine=SMALL, workers=2, name="b")]
    workload = workload_of([i / 20 for i in range(60)], prompt=100, answer=40, block=16)
    autoscale = Autoscale(scaler=Steps([(1000, None, 5)]))
    made = run_offline(RunPlan(workload, pools=pools, autoscale=autoscale, check=True))
    assert made.timeline.lives is not None
    assert made.timeline.lives.worker_pool.tolist() == [0, 1, 1, 0, 0]


def test_sglang_workers_join_and_leave() -> None:
    engine = SglangConfig(block_size=16, num_gpu_blocks=200)
    made = run([i / 20 for i in range(100)], Steps([(1000, None, 3), (3000, None, 1)]), engine)
    assert made.timeline.completed.all()
    _check_lives(made)


def test_a_deep_check_compares_a_changing_fleet_step_by_step() -> None:
    workload = workload_of([i / 20 for i in range(60)], prompt=100, answer=40, block=16)
    autoscale = Autoscale(scaler=Steps([(1000, None, 3), (2000, None, 1)]))
    made = run_offline(RunPlan(workload, SMALL, autoscale=autoscale, check="deep"))
    assert any("step" in note for note in made.notes)


def test_a_user_defined_router_sees_workers_come_and_go() -> None:
    from understudy.router import Router

    seen: list[tuple[str, ...]] = []

    class Watching(Router):
        def choose(self, request: Any, view: Any) -> int:  # noqa: ARG002
            seen.append(tuple(view.states))
            return int(view.ready[-1])

    run([0.0, 1.5, 2.5, 9.0], Steps([(1000, None, 2), (2000, None, 1)]), startup_s=0.1, routing=Watching())
    assert seen[0] == ("ready",)
    assert seen[1] == ("ready", "ready")
    assert seen[-1] == ("ready", "gone")


# ── What a scaler is told, and what is refused ──


class Watch:
    """Ask for nothing, and keep what was measured."""

    seen: list[TickMetrics] = []  # noqa: RUF012

    def initial_tick_ms(self) -> float:
        return 1000.0

    def on_tick(self, metrics: TickMetrics) -> Decision:
        Watch.seen.append(metrics)
        return {"target_prefill": None, "target_decode": None, "next_tick_ms": metrics["now_ms"] + 1000}


def test_the_traffic_of_all_ticks_is_that_of_the_run() -> None:
    Watch.seen = []
    workload = burst()
    made = run_offline(RunPlan(workload, ENGINE, workers=2, autoscale=Autoscale(scaler=Watch())))
    windows = [one["traffic"] for one in Watch.seen]
    assert all(window is not None and window["duration_s"] == 1.0 for window in windows)
    arrived = sum(window["num_req"] for window in windows if window is not None)
    assert arrived == len(workload)
    ended = [window for window in windows if window is not None and window["shape_count"]]
    assert all((window["avg_isl"], window["avg_osl"]) == (2048.0, 256.0) for window in ended)
    ttft_ms = sum(window["avg_ttft_ms"] * window["ttft_count"] for window in ended)
    last_ns = int(Watch.seen[-1]["now_ms"] * 1e6)
    rows = made.timeline.finish_ns <= last_ns
    expected = (made.timeline.first_token_ns - made.timeline.arrival_ns)[rows].sum() / 1e6
    assert ttft_ms == pytest.approx(expected)


def test_a_scaler_sees_each_workers_step_and_queue() -> None:
    Watch.seen = []
    run_offline(RunPlan(burst(), ENGINE, workers=2, autoscale=Autoscale(scaler=Watch())))
    for metrics in Watch.seen:
        for one in metrics["decode_fpm_snapshots"]:
            assert one["sum_queued_prefill_tokens"] == 2048 * one["num_queued_prefill"]
            assert 0 <= one["sum_decode_kv_tokens"] <= 1024 * 64
            assert one["num_decode_requests"] * 2048 <= one["sum_decode_kv_tokens"]
    busiest = max(Watch.seen, key=lambda one: one["decode_fpm_snapshots"][0]["num_queued_prefill"])
    assert busiest["now_ms"] > 60_000
    assert busiest["decode_fpm_snapshots"][0]["num_queued_prefill"] > 50


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"scaler": "hpb"}, "'hpb' is unknown"),
        ({"scaler": 3}, "scaler must be a name"),
        ({"min_workers": 3, "max_workers": 2}, "max_workers: 2 is below"),
        ({"min_workers": 3}, "workers: 1 is outside"),
        ({"startup_s": -1.0}, "startup_s"),
        ({"weight_bytes": 5}, "needs weights_gbps"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_offline(RunPlan(burst(), ENGINE, autoscale=Autoscale(**settings)))


def test_steps_of_a_changing_fleet_are_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record_steps does not work with autoscale"):
        RunPlan(burst(), ENGINE, autoscale=Autoscale(), record_steps=tmp_path / "steps")


def test_a_scaler_that_breaks_its_contract_ends_the_run() -> None:
    class Late(Watch):
        def on_tick(self, metrics: TickMetrics) -> Decision:
            return {"target_prefill": None, "target_decode": None, "next_tick_ms": metrics["now_ms"]}

    class Half(Watch):
        def on_tick(self, metrics: TickMetrics) -> Decision:  # noqa: ARG002
            return {"target_prefill": None, "target_decode": 1.5, "next_tick_ms": None}  # type: ignore[typeddict-item]

    for scaler, said in ((Late(), "must be after this one"), (Half(), "must be a number of workers")):
        with pytest.raises(PolicyError, match=said):
            run_offline(RunPlan(burst(), ENGINE, autoscale=Autoscale(scaler=scaler)))


def test_replay_takes_a_scaler_from_the_command_line(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 50 * i,
            "input_length": 100,
            "output_length": 20,
            "hash_ids": [*range(7 * i, 7 * i + 7)],
        }
        for i in range(100)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    plan = tmp_path / "plan.jsonl"
    plan.write_text('{"at_s": 1, "workers": 3}\n{"at_s": 3, "workers": 1}\n', encoding="utf-8")
    out = tmp_path / "report.json"
    flags = ["--autoscale", f"schedule,file={plan}", "--startup-s", "0.5", "--quiet", "--json", str(out)]
    assert main(["replay", str(trace), "--trace-block-size", "16", *flags]) == 0
    report = json.loads(out.read_text())
    assert report["run"]["autoscale"]["startup_s"] == 0.5
    assert main(["replay", str(trace), "--startup-s", "1"]) == 2

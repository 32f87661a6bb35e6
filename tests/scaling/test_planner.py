"""The native planner decides as Dynamo's did, tick by tick."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from model.gpu_budget import holds, nearest_between
from scaling.recorded import GOLDEN, metrics_of, read_recording, snapshot
from understudy.cli import main
from understudy.conformance.planner import compare_planner, find_planner_recordings, make_recorded_planner
from understudy.errors import ConfigError
from understudy.scaling.budget import GpuBand, clamp_one, clamp_pair, fit_between, guard_one, guard_pair
from understudy.scaling.capabilities import WorkerCapabilities, read_capabilities
from understudy.scaling.capacity import decode_rps, prefill_rps, whole_rps
from understudy.scaling.estimates import LatencyEstimates, LinearPassTime, RecentMean
from understudy.scaling.planner import DynamoPlanner
from understudy.scaling.planner_settings import PlannerSettings, read_planner_settings

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.conformance.planner import PlannerRecording

FILES = sorted(GOLDEN.glob("*.jsonl.gz"))


@pytest.mark.parametrize("recording", find_planner_recordings(GOLDEN), ids=lambda one: str(one.name))
def test_every_recorded_tick_is_decided_alike(recording: PlannerRecording) -> None:
    outcome = compare_planner(recording)
    assert outcome.difference is None, outcome.difference
    assert outcome.steps >= 40


def test_the_command_ends_in_n_of_n(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "planner", str(GOLDEN)]) == 0
    assert f"{len(FILES)} of {len(FILES)} scenarios identical" in capsys.readouterr().out


def test_the_command_names_the_tick_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import gzip

    header, ticks = read_recording(FILES[0])
    changed = next(tick for tick in ticks if tick["decision"]["target_decode"])
    changed["decision"]["target_decode"] += 1
    lines = "\n".join(json.dumps(line) for line in (header, *ticks))
    (tmp_path / "wrong.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert main(["conformance", "planner", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"at {changed['metrics']['now_ms'] / 1000:g} s" in said
    assert "target_decode" in said


@pytest.mark.parametrize(
    "path", [path for path in FILES if "sla" in path.name], ids=lambda path: str(path.name)
)
def test_estimates_and_rates_are_those_that_were_recorded(path: Path) -> None:
    header, ticks = read_recording(path)
    settings = read_planner_settings(header["config"])
    workers = read_capabilities(header["capabilities"])
    pass_time = LinearPassTime(**header["estimator"])
    split = settings.mode == "disagg"
    estimates = LatencyEstimates("decode" if split else "both", pass_time, workers["decode"])
    hit_rate: float | None = None
    compared = 0
    for tick in ticks:
        said: dict[str, Any] = tick["diagnostics"]
        seen = tick["metrics"]["decode_fpm_snapshots"]
        estimates.observe(seen)
        if said.get("predicted_kv_hit_rate") is not None:
            hit_rate = said["predicted_kv_hit_rate"]
        if "estimated_ttft_ms" in said:
            first = max(estimates.first_token_ms(one, hit_rate) for one in seen)
            between = max(estimates.between_tokens_ms(one) for one in seen)
            assert (first, between) == pytest.approx(
                (said["estimated_ttft_ms"], said["estimated_itl_ms"]), rel=1e-9
            )
            compared += 1
        if said.get("engine_rps_decode") is not None:
            isl, osl = said["predicted_isl"], said["predicted_osl"]
            goals = settings.ttft_ms, settings.itl_ms
            if split:
                prompts = prefill_rps(pass_time, workers["prefill"], isl, goals[0], hit_rate)
                answers = decode_rps(pass_time, workers["decode"], isl, osl, goals[1])
            else:
                prompts = answers = whole_rps(pass_time, workers["decode"], isl, osl, *goals, hit_rate)
            expected = said["engine_rps_prefill"], said["engine_rps_decode"]
            assert (prompts, answers) == pytest.approx(expected, rel=1e-12)
            compared += 1
    assert compared >= 8


def test_a_planner_starts_again_from_its_settings() -> None:
    header, ticks = read_recording(FILES[0])
    first, second = make_recorded_planner(header), make_recorded_planner(header)
    assert [first.on_tick(tick["metrics"]) for tick in ticks] == [second.on_tick(t["metrics"]) for t in ticks]


small = st.integers(1, 12)
pairs = st.tuples(small, small)
bands = st.tuples(st.integers(-1, 20), st.integers(-1, 30))


@given(pairs, pairs, st.tuples(st.integers(1, 3), st.integers(1, 3)), bands, st.integers(1, 2))
def test_a_fit_between_is_the_nearest_pair_that_the_budget_allows(
    now: tuple[int, int], wanted: tuple[int, int], costs: tuple[int, int], band: tuple[int, int], floor: int
) -> None:
    floors = floor, floor
    expected = nearest_between(now, wanted, costs, *band, floors)
    assert fit_between(now, wanted, costs, GpuBand(*band), floors) == expected


@given(pairs, pairs, st.tuples(st.integers(1, 3), st.integers(1, 3)), bands)
def test_a_guard_never_reverses_what_was_wanted_nor_breaks_the_ceiling(
    now: tuple[int, int], wanted: tuple[int, int], costs: tuple[int, int], band: tuple[int, int]
) -> None:
    least, most = band
    assume(most < 0 or least <= most)
    assume(holds(now, costs, least, most))
    final = guard_pair(now, wanted, costs, GpuBand(*band), (1, 1))
    for have, want, got in zip(now, wanted, final, strict=True):
        assert min(have, want) <= got <= max(have, want)
    assert holds(final, costs, -1, most)


@given(small, small, st.integers(1, 3), bands)
def test_a_single_role_stays_between_now_and_wanted(
    now: int, wanted: int, cost: int, band: tuple[int, int]
) -> None:
    least, most = band
    assume((most < 0 or now * cost <= most) and now * cost >= least)
    final = guard_one(now, wanted, cost, GpuBand(*band), 1)
    assert min(now, wanted) <= final <= max(now, wanted)
    assert most < 0 or final * cost <= most


def test_budgets_shrink_in_proportion_and_say_zero_when_nothing_fits() -> None:
    assert clamp_pair((5, 4), (1, 1), GpuBand(-1, 8), (1, 1)) == (4, 4)
    assert clamp_pair((1, 1), (8, 8), GpuBand(-1, 8), (1, 1)) == (0, 0)
    assert clamp_pair((1, 1), (1, 1), GpuBand(8, -1), (1, 1)) == (4, 4)
    assert clamp_pair((0, 0), (1, 1), GpuBand(8, 8), (1, 1)) == (4, 4)
    assert clamp_one(9, 2, GpuBand(-1, 8), 1) == 4
    assert clamp_one(1, 1, GpuBand(4, -1), 1) == 4
    assert clamp_one(1, 9, GpuBand(-1, 8), 1) == 0


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(1, 8))
def test_a_recent_mean_forgets_the_oldest_and_skips_leading_zeros(values: list[float], size: int) -> None:
    mean = RecentMean(size)
    for value in values:
        mean.add(value)
    first = next((index for index, value in enumerate(values) if value > 0), len(values))
    kept = values[first:][-size:]
    assert mean.value == pytest.approx(sum(kept) / len(kept) if kept else 0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("given_settings", "says"),
    [
        ({"mode": "prefill"}, "mode"),
        ({"optimization_target": "sla", "load_predictor": "arima"}, "load_predictor"),
        ({"optimization_target": "load", "mode": "agg"}, "decode_scale_up_kv_rate"),
        ({"optimization_target": "sla", "enable_throughput_scaling": False}, "enable_load_scaling"),
        ({"ttft_ms": 0}, "ttft_ms"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_settings_that_are_not_usable_are_named(given_settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_planner_settings(given_settings)


def test_a_latency_goal_needs_a_timing_model_and_a_split_fleet_both_roles() -> None:
    with pytest.raises(ConfigError, match="timing model"):
        DynamoPlanner(
            PlannerSettings(mode="agg", optimization_target="sla"), {"decode": WorkerCapabilities()}
        )
    with pytest.raises(ConfigError, match="prefill"):
        DynamoPlanner(PlannerSettings(mode="disagg"), {"decode": WorkerCapabilities()})


def test_a_worker_without_a_snapshot_holds_the_decision() -> None:
    worker = WorkerCapabilities(max_kv_tokens=1000)
    planner = DynamoPlanner(PlannerSettings(mode="agg"), {"decode": worker})
    planner.initial_tick_ms()
    metrics = metrics_of(5000, [snapshot(0, sum_decode_kv_tokens=2000)])
    metrics["active_decode_count"] = metrics["non_draining_decode_count"] = 2
    assert planner.on_tick(metrics)["target_decode"] is None
    assert planner.on_tick(metrics_of(10000, [snapshot(0, sum_decode_kv_tokens=2000)]))["target_decode"] == 2

"""Scalers beside the planner: HPA, WVA, timetables, and the one for backlogs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.recorded import metrics_of, snapshot, traffic_of
from understudy.errors import ConfigError
from understudy.scaling.capabilities import WorkerCapabilities
from understudy.scaling.estimates import LinearPassTime
from understudy.scaling.hpa import HpaRule, HpaSettings, recommend
from understudy.scaling.names import NAMES, ScalerSite, make_scaler

if TYPE_CHECKING:
    from pathlib import Path

WORKER = WorkerCapabilities(max_kv_tokens=65_536)
PASS = LinearPassTime(6.0, 0.03, 0.05, 0.00012)
SITE = ScalerSite({"decode": WORKER}, PASS)


def test_the_hpa_recommends_as_its_documentation_says() -> None:
    assert (
        recommend([200.0], 0, 0, 100.0, 0.1) == 2
    )  # "if the current value is 200m, and the desired 100m: doubled"
    assert recommend([50.0, 50.0], 0, 0, 100.0, 0.1) == 1
    assert recommend([105.0, 105.0], 0, 0, 100.0, 0.1) == 2  # within the tolerance
    assert recommend([300.0], 2, 0, 100.0, 0.1) == 3  # starting workers count as 0 on the way up
    assert recommend([50.0], 0, 1, 100.0, 0.1) == 2  # a missing value counts as on target on the way down
    assert recommend([], 1, 0, 100.0, 0.1) == 1


@given(st.lists(st.floats(0.01, 1000), min_size=1, max_size=20))
def test_the_hpa_asks_for_the_sum_over_the_target(values: list[float]) -> None:
    asked = recommend(values, 0, 0, 10.0, 0.1)
    ratio = sum(values) / len(values) / 10.0
    assert asked == (len(values) if abs(ratio - 1) <= 0.1 else math.ceil(ratio * len(values)))


def test_the_hpa_keeps_the_highest_recommendation_of_five_minutes_and_limits_growth() -> None:
    rule = HpaRule(HpaSettings(most=100))
    assert rule.decide(0, 1, 50) == 5  # four workers or twice as many in 15 s
    assert rule.decide(15, 5, 50) == 10
    assert rule.decide(30, 10, 1) == 10
    assert rule.decide(320, 10, 1) == 1
    assert HpaRule(HpaSettings(most=3)).decide(0, 1, 50) == 3


def test_the_hpa_scales_a_fleet_by_its_metric() -> None:
    scaler = make_scaler("hpa,metric=queued_requests,target=2", SITE)
    assert scaler.initial_tick_ms() == 15_000
    busy = metrics_of(15_000, [snapshot(0, num_queued_prefill=6)])
    decided = scaler.on_tick(busy)
    assert decided["target_decode"] == 3
    assert decided["next_tick_ms"] == 30_000


def test_wva_asks_for_the_tokens_that_are_missing_and_returns_what_is_spare() -> None:
    scaler = make_scaler("wva", SITE)
    full = snapshot(0, sum_decode_kv_tokens=40_000, sum_queued_prefill_tokens=60_000, num_queued_prefill=30)
    # Capacity 40,000 (it queued there); 100,000 / 0.85 less 40,000 are required.
    assert scaler.on_tick(metrics_of(15_000, [full]))["target_decode"] == 3
    idle = make_scaler("wva", SITE)
    quiet = [snapshot(worker, sum_decode_kv_tokens=100) for worker in range(3)]
    assert idle.on_tick(metrics_of(15_000, quiet))["target_decode"] == 1


def test_a_timetable_sets_numbers_at_its_times(tmp_path: Path) -> None:
    plan = tmp_path / "plan.jsonl"
    plan.write_text('{"at_s": 10, "workers": 2}\n\n{"at_s": 60, "prefill": 1, "decode": 4}\n')
    scaler = make_scaler(f"schedule,file={plan}", SITE)
    assert scaler.initial_tick_ms() == 10_000
    first = scaler.on_tick(metrics_of(10_000, [snapshot()]))
    assert first == {"target_prefill": None, "target_decode": 2, "next_tick_ms": 60_000}
    second = scaler.on_tick(metrics_of(60_000, [snapshot()]))
    assert second == {"target_prefill": 1, "target_decode": 4, "next_tick_ms": None}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"workers": 1}',
        '{"at_s": -1, "workers": 1}',
        '{"at_s": 1, "workers": -1}',
        '{"at_s": 1, "x": 1}',
        "{",
    ],
)
def test_a_timetable_that_is_not_usable_is_refused(tmp_path: Path, text: str) -> None:
    plan = tmp_path / "plan.jsonl"
    plan.write_text(text)
    with pytest.raises(ConfigError, match="schedule"):
        make_scaler(f"schedule,file={plan}", SITE)


def test_the_backlog_scaler_adds_all_workers_that_a_burst_needs_at_once() -> None:
    scaler = make_scaler("backlog", SITE)
    calm = scaler.on_tick(
        metrics_of(1000, [snapshot()], traffic=traffic_of(1, 1, ended=1, isl=2048, osl=256))
    )
    assert calm["target_decode"] is None
    for second in (2, 3, 4):
        burst = traffic_of(1, 16, ended=1, isl=2048, osl=256)
        decided = scaler.on_tick(metrics_of(second * 1000, [snapshot(num_queued_prefill=10)], traffic=burst))
    assert decided["target_decode"] is not None
    assert decided["target_decode"] >= 3


def test_the_backlog_scaler_removes_workers_only_after_a_quiet_time() -> None:
    scaler = make_scaler("backlog,quiet_s=5", SITE)
    targets = []
    for second in range(1, 12):
        traffic = traffic_of(1, 16 if second < 4 else 0, ended=1, isl=2048, osl=256)
        targets.append(
            scaler.on_tick(metrics_of(second * 1000, [snapshot(i) for i in range(4)], traffic=traffic))[
                "target_decode"
            ]
        )
    assert targets[-1] == 1
    assert all(target is None or target >= 3 for target in targets[:7])


def test_every_name_is_known_and_an_unknown_one_or_setting_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.jsonl"
    plan.write_text('{"at_s": 0, "workers": 2}')
    for name in NAMES:
        made = make_scaler(f"schedule,file={plan}" if name == "schedule" else name, SITE)
        assert made.initial_tick_ms() >= 0
    for text in (
        "hpaa",
        "hpa,colour=red",
        "hpa,target",
        "hpa,target=much",
        "hpa,up_workers=1.5",
        "schedule",
        "wva,a=1",
    ):
        with pytest.raises(ConfigError, match="--autoscale"):
            make_scaler(text, SITE)
    with pytest.raises(ConfigError, match="timing model"):
        make_scaler("backlog", ScalerSite({"decode": WORKER}))


def test_a_class_in_a_file_is_a_scaler(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Two:\n"
        "    def initial_tick_ms(self): return 1000.0\n"
        "    def on_tick(self, metrics): return {'target_prefill': None, 'target_decode': 2, 'next_tick_ms': None}\n"
    )
    assert make_scaler(f"{file}:Two", SITE).on_tick(metrics_of(1000, [snapshot()]))["target_decode"] == 2
    with pytest.raises(ConfigError, match="Three"):
        make_scaler(f"{file}:Three", SITE)

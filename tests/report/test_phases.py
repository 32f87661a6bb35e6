"""Where a request's time goes: phases add up to its latency, in numbers and on the page."""

from __future__ import annotations

import numpy as np
import pytest

from report.building import Row, crowd, timeline
from report.test_html import checked
from report.tier_building import tiered
from understudy.report import Report
from understudy.report.html import page
from understudy.report.html.phase_chart import latency_by_phase
from understudy.report.html.tiles import points, tiles
from understudy.report.phases import NAMES, Phases
from understudy.run.timeline import Status


def test_the_phases_of_one_request() -> None:
    report = Report.build(timeline(Row([40, 50, 90], arrival_ms=2, admit_ms=12)))
    assert Phases.of(report).means() == {
        "queue_ms": 10,
        "room_ms": 0,
        "parked_ms": 0,
        "prefill_ms": 28,
        "decode_ms": 50,
    }


@pytest.mark.parametrize("columns", [crowd(300), tiered()])
def test_phases_add_up_to_the_latency(columns: object) -> None:
    report = Report.build(columns)  # type: ignore[arg-type]
    rows = report.columns.completed & (report.columns.output_tokens > 0)
    np.testing.assert_allclose(Phases.of(report).total_ms, report.latencies.e2e_ms[rows])
    assert all((getattr(Phases.of(report), name) >= 0).all() for name in NAMES)


def test_the_slowest_percent_is_the_slowest() -> None:
    rows = [Row([float(number + 10)]) for number in range(200)]
    phases = Phases.of(Report.build(timeline(*rows)))
    assert sorted(phases.slowest().tolist()) == [198, 199]


def test_the_page_shows_them_with_a_legend_and_the_baseline() -> None:
    report = Report.build(crowd(100))
    card = latency_by_phase(report, report)
    assert card is not None
    assert card.figure.count("baseline") == 2
    assert ("base solid", "decode") in card.legend
    assert "Latency by phase" in checked(page(report, report)).text
    assert latency_by_phase(Report.build(timeline(Row(status=Status.REJECTED, worker=-1))), None) is None


def test_ratios_change_in_points_and_the_rest_in_percent() -> None:
    assert points(0.08, 0.067, +1) == '<span class="delta good">+1.3 points</span>'
    assert points(0.067, 0.08, +1) == '<span class="delta bad">−1.3 points</span>'
    assert points(0.08, 0.08) == '<span class="delta">± 0 points</span>'
    assert points(0.08, float("nan")) == ""
    assert "points" in tiles(Report.build(crowd(100)), Report.build(crowd(200)))

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from report.building import Row, crowd, timeline
from understudy.report import Report, Slo
from understudy.report.html import page
from understudy.report.html.scale import Scale
from understudy.run.facts import RunFacts
from understudy.run.timeline import Status
from understudy.text import compact
from understudy.workload.reuse import HitCurve

if TYPE_CHECKING:
    from pathlib import Path

VOID = {"meta", "link", "path", "circle"}


class Checker(HTMLParser):
    """Insists that tags are balanced; collects what the page carries."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.data: list[Any] = []
        self._json = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        self._json = ("type", "application/json") in attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open, f"</{tag}> closes nothing"
            assert self.open.pop() == tag
        self._json = False

    def handle_data(self, data: str) -> None:
        if self._json:
            self.data.append(json.loads(data))
        self.text.append(data)


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    return checker


CROWD = Report.build(crowd(600), RunFacts(workload="crowd", engine={"block_size": 64}), Slo(ttft_ms=500))
PAGES = {
    "crowd": page(CROWD),
    "many workers": page(Report.build(crowd(900, num_workers=200))),
    "compared": page(CROWD, Report.build(crowd(300, seed=1), RunFacts(workload="before"))),
    "compared with nothing": page(CROWD, Report.build(timeline())),
    "nobody": page(Report.build(timeline())),
    "one token": page(Report.build(timeline(Row([10])))),
    "no output": page(Report.build(timeline(Row(finish_ms=5)))),
    "all at once": page(Report.build(timeline(Row([0]), Row([0])))),
    "all rejected": page(Report.build(timeline(Row(status=Status.REJECTED, worker=-1)))),
    "all unfinished": page(Report.build(timeline(Row(status=Status.UNFINISHED), arrival_ns=[-1]))),
    "a burst": page(Report.build(timeline(Row([10, 10, 10, 20])))),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_well_formed_and_has_no_nan(name: str) -> None:
    checker = checked(PAGES[name])
    for _, value in checker.attributes:
        assert not re.search(r"\b(nan|inf|None)\b", value)
    visible = " ".join(text for text in checker.text)
    assert not re.search(r"\bnan\b", visible)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_nobody_for_anything(name: str) -> None:
    text = PAGES[name]
    assert not re.search(r"(https?:)?//[a-z0-9.-]+\.[a-z]", text)
    assert "@import" not in text
    assert "url(" not in text
    assert {value for attribute, value in checked(text).attributes if attribute in ("src", "href")} == {
        "data:,"
    }


@pytest.mark.parametrize("name", PAGES)
def test_hover_data_has_a_text_for_every_point(name: str) -> None:
    for data in checked(PAGES[name]).data:
        points = len(data["px"])
        assert points
        assert len(data["label"]) == points
        assert all(len(series["text"]) == points for series in data["series"])
        assert all(px is not None for px in data["px"])


def test_the_same_run_gives_the_same_page() -> None:
    assert page(Report.build(crowd(300, seed=3))) == page(Report.build(crowd(300, seed=3)))


def test_a_page_of_many_requests_stays_small(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    Report.build(crowd(12_000, mean_output=20), slo=Slo(ttft_ms=500)).to_html(path)
    assert path.stat().st_size < 500_000
    assert "percentiles by arrival" in path.read_text()


def test_a_page_with_the_most_dots_stays_small() -> None:
    report = Report.build(crowd(5_000, mean_output=5))
    text = page(report)
    assert "one dot per request" in text
    assert len(text.encode()) < 1_000_000


def test_every_plot_is_there() -> None:
    for title in (
        "Time to first token",
        "Request latency",
        "Inter-token latency",
        "TTFT over time",
        "Running and waiting",
        "KV cache",
        "Prefix hit ratio",
        "Balance of the workers",
        "KV usage by worker",
        "Latency by phase, over time",
    ):
        assert f"<h2>{title}</h2>" in PAGES["crowd"], title


def test_a_run_without_data_has_tiles_and_tables_and_no_plot() -> None:
    assert "<svg" not in PAGES["nobody"]
    assert "Distributions" in PAGES["nobody"]


def test_a_comparison_overlays_the_baseline() -> None:
    assert 'class="line base"' in PAGES["compared"]
    assert "compared with <b>before</b>" in PAGES["compared"]
    assert 'class="delta' in PAGES["compared"]
    assert 'class="line base"' not in PAGES["crowd"]


def test_the_baseline_stands_under_every_plot_over_time() -> None:
    for name in ("baseline, p50", "running, baseline", "active, baseline"):
        assert name in PAGES["compared"]
        assert name not in PAGES["crowd"]
        assert name not in PAGES["compared with nothing"]


def test_the_curve_over_cache_sizes_marks_todays_sizes_and_the_bound() -> None:
    curve = HitCurve(
        hit_tokens=64 * np.searchsorted([10, 20, 4_000, 5_000], np.arange(5_001), side="right"),
        block_size=64,
        prompt_tokens=640,
        smallest_blocks=8,
        distinct_blocks=9_000,
    )
    report = replace(CROWD)
    vars(report)["hit_curve"] = curve  # in place of the one of its workload
    text = page(report)
    checked(text)
    blocks, found = CROWD.columns.blocks_per_worker, CROWD.prefix_hit_ratio.first_admission
    assert f"this run, {compact(blocks)}: {round(found * 100):d} %" in text
    assert f"At this run&#x27;s size: curve {round(curve.hit_ratio(blocks) * 100):d} %" in text
    assert "unlimited 40 %" in text
    assert "Hit ratio against cache size" not in PAGES["crowd"]


def test_many_workers_are_shown_from_the_fullest_to_the_emptiest() -> None:
    assert "64 of 200 workers, from the fullest to the emptiest" in PAGES["many workers"]
    assert "KV usage by worker" not in PAGES["one token"]


def test_what_did_not_complete_is_listed_with_its_reason() -> None:
    rows = [Row([10])] + [Row(status=Status.REJECTED, worker=-1)] * 60
    text = page(Report.build(timeline(*rows, reject_reasons={1: "needs 9 blocks, a worker has 4"})))
    assert "needs 9 blocks, a worker has 4" in text
    assert "the first 50 of 60" in text
    assert "Requests that did not complete" not in PAGES["one token"]


def test_words_from_outside_are_escaped() -> None:
    evil = "<script>alert(1)</script>\"'&"
    run = RunFacts(workload=evil, digest=evil, engine={evil: evil})
    report = Report.build(timeline(Row(status=Status.REJECTED, worker=-1), reject_reasons={0: evil}), run)
    text = page(report, Report.build(timeline(), run))
    assert "<script>alert" not in text
    checked(text)


@given(st.floats(1e-6, 1e12), st.floats(0, 1e9), st.booleans())
def test_an_axis_covers_its_values_with_a_few_ticks(high: float, low: float, exact: bool) -> None:
    scale = Scale.linear(high, (0, 100), exact=exact)
    assert scale.high >= high * (1 - 1e-9)
    assert 2 <= len(scale.ticks) <= 12
    assert all(0 <= value <= scale.high * (1 + 1e-9) for value, _ in scale.ticks)
    assert len({label for _, label in scale.ticks}) == len(scale.ticks)
    bounded = Scale.linear(low + high, (0, 100), low=low)
    assert bounded.pixel(low) == 0


@given(st.floats(1e-3, 1e6), st.floats(1, 1e7))
def test_a_log_axis_covers_its_values_with_a_few_ticks(low: float, ratio: float) -> None:
    scale = Scale.logarithmic(low, low * ratio, (0, 100))
    assert 0 <= len(scale.ticks) <= 12
    inside = scale.pixels(np.array([low, low * ratio]))
    assert -1e-6 <= inside[0] <= inside[1] <= 100 + 1e-6


def test_flags_are_not_broken_across_lines() -> None:
    from understudy.report.html.frame import prose
    from understudy.report.html.style import STYLE

    assert prose("Lower --max-num-batched-tokens (now 8,192) & wait") == (
        'Lower <code class="flag">--max-num-batched-tokens</code> (now 8,192) &amp; wait'
    )
    assert prose("use --workers 4, or a dash -- here") == (
        'use <code class="flag">--workers 4</code>, or a dash -- here'
    )
    assert "code.flag {" in STYLE
    rule = STYLE.partition("code.flag {")[2].partition("}")[0]
    assert "white-space: nowrap" in rule

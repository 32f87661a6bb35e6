"""What a report says of tiers, against columns made by hand."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from report.building import Row, crowd, timeline
from report.test_html import checked
from report.tier_building import tiered
from understudy.errors import InvalidArgument
from understudy.report import Report, Slo, Statistics
from understudy.report.goodput import Goodput
from understudy.report.html import page
from understudy.report.html.tier_tables import LINK_COLUMNS, TIER_COLUMNS
from understudy.report.tier_metrics import TIER_METRICS
from understudy.report.tier_table import build_comparison, build_link_table, build_tier_table, list_tier_facts
from understudy.report.tiers import LINK_WINDOWS, TiersReport
from understudy.run.facts import RunFacts
from understudy.text import size
from understudy.workload.columns import RowError

if TYPE_CHECKING:
    from pathlib import Path

REPORT = Report.build(tiered(), RunFacts(workload="by hand", digest="0123456789abcdef"))
BARE = Report.build(crowd(300))
assert REPORT.tiers is not None
TIERS: TiersReport = REPORT.tiers
PLOTS = ("Hits by tier", "Links", "Residency", "Onboard latency")


def printed(report: Report, width: int = 120) -> str:
    out = io.StringIO()
    report.print(Console(file=out, width=width, highlight=False))
    return out.getvalue()


# --- numbers --------------------------------------------------------------------------------------------------------


def test_hit_tokens_are_told_by_tier_and_add_up_to_the_prefix_hits() -> None:
    device, _, disk = TIERS.tiers
    assert [use.tier for use in TIERS.tiers] == ["g1", "g2", "g3"]
    assert [use.hit_tokens_first for use in TIERS.tiers] == [16, 48, 32]
    assert [use.hit_tokens_total for use in TIERS.tiers] == [32, 64, 32]
    assert device.hit_ratio_first == 16 / 300
    assert disk.hit_ratio_total == 32 / 400  # the third was admitted twice
    assert sum(use.hit_ratio_first for use in TIERS.tiers) == pytest.approx(
        REPORT.prefix_hit_ratio.first_admission
    )
    assert sum(use.hit_ratio_total for use in TIERS.tiers) == pytest.approx(REPORT.prefix_hit_ratio.total)


def test_residency_is_a_share_of_each_workers_capacity() -> None:
    device, host, disk = TIERS.tiers
    # Worker 0 is full for half of the time, worker 1 never has anything.
    assert (device.resident_mean, device.resident_max, device.resident_end) == (0.25, 1.0, 0.75)
    assert (host.resident_mean, host.resident_max, host.resident_end) == (100 / 400 / 4, 0.25, 0.25)
    # Nothing for half of the time, then 20 blocks and then 10 for a quarter each.
    assert (disk.resident_mean, disk.resident_max, disk.resident_end) == (0.0075, 0.02, 0.01)
    assert (TIERS.held_mean, TIERS.held_max) == (10 / 100 / 4, 0.1)
    assert (host.stored_blocks, host.evicted_blocks, host.capacity_blocks) == (8, 2, 800)


def test_latencies_of_loads_and_waits_are_exact() -> None:
    assert TIERS.onboard_ms == Statistics.of(np.array([1.0, 3.0, 5.0]))
    assert (TIERS.parked_ms.count, TIERS.parked_ms.p50, TIERS.parked_s) == (2, 3, 0.008)
    assert (TIERS.room_wait_ms.count, TIERS.room_wait_ms.max, TIERS.room_wait_s) == (1, 7, 0.007)
    assert TIERS.counts.slow_loads == 4
    assert TIERS.counts.onboarded_blocks == 6


def test_links_of_a_kind_stand_together_nearest_first() -> None:
    assert [link.name for link in TIERS.links] == [
        "g1_to_g2",
        "g2_to_g1",
        "g2_to_g3",
        "g2_to_g3_backend",
        "g3_to_g2_backend",
    ]
    down, up, free, backend, idle = TIERS.links
    assert (down.links, backend.links) == (2, 1)
    assert (down.transfers, down.bytes) == (6, 51_000_000)
    # 50 of 100 ms at full speed; what the other moved after the last token does not count.
    assert (down.utilisation_mean, down.utilisation_max) == (0.25, 0.5)
    assert up.utilisation_max == pytest.approx(0.1)
    assert backend.utilisation_mean == pytest.approx(0.01)
    assert idle.utilisation_mean == 0
    assert math.isnan(free.utilisation_mean)
    assert free.bytes == 2_000_000


def test_links_are_told_over_time() -> None:
    down = TIERS.links[0]
    assert len(down.window_bytes) == len(down.window_utilisation) == LINK_WINDOWS
    assert down.window_s * LINK_WINDOWS == pytest.approx(0.1)
    assert sum(down.window_bytes) == pytest.approx(50_000_000)
    assert down.window_utilisation[0] == pytest.approx(0.5)  # one of two
    assert down.window_utilisation[-1] == 0


def test_columns_that_contradict_the_timeline_are_refused() -> None:
    with pytest.raises(RowError, match=r"below_tokens_first\[1\] is more than was cached"):
        tiered(below_tokens_first=([0, 65, 0], [0, 0, 0], [0, 0, 0]))
    with pytest.raises(RowError, match=r"parked_ns\[0\] must not be negative"):
        tiered(parked_ns=[-1, 0, 0])
    with pytest.raises(RowError, match=r"sample_held_blocks\[1\]"):
        tiered(sample_held_blocks=[0, 21, 0])
    with pytest.raises(InvalidArgument, match="room_wait_ns must have 3 entries"):
        tiered(room_wait_ns=[0])
    with pytest.raises(InvalidArgument, match="sample_held_blocks and sample_time_ns have different"):
        tiered(sample_held_blocks=[0], sample_host_blocks=[0])


def test_a_run_whose_tiers_did_nothing_has_a_report() -> None:
    columns = tiered().tiers
    assert columns is not None
    empty = np.zeros(0, np.int64)
    nobody = replace(
        columns,
        below_tokens_first=(empty,) * 3,
        below_tokens_total=(empty,) * 3,
        parked_ns=empty,
        room_wait_ns=empty,
        onboard_ns=empty,
        sample_held_blocks=empty,
        sample_host_blocks=empty,
    )
    report = Report.build(timeline(tiers=nobody))
    assert report.tiers is not None
    assert math.isnan(report.tiers.onboard_ms.p99)
    assert math.isnan(report.tiers.tiers[0].hit_ratio_first)
    checked(page(report))
    assert "nan" not in printed(report)
    json.loads(json.dumps(report.to_dict(), allow_nan=False))


# --- JSON and rows --------------------------------------------------------------------------------------------------


def values(data: Any, path: str = "") -> set[str]:
    if isinstance(data, dict) and "p99" not in data:
        return set().union(*(values(item, f"{path}.{key}") for key, item in data.items()))
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return set().union(*(values(item, f"{path}[]") for item in data))
    return {path.removeprefix(".")}


def test_json_has_every_number_of_tiers_and_its_definition() -> None:
    data = REPORT.to_dict()
    text = json.dumps(data, allow_nan=False)
    assert json.loads(text) == data
    names = {"tiers.tiers[].tier", "tiers.links[].name"}
    assert values({"tiers": data["tiers"]}) - names == {metric.key for metric in TIER_METRICS}
    assert {metric.key for metric in TIER_METRICS} <= data["definitions"].keys()
    assert data["tiers"]["tiers"][2]["resident_mean"] == 0.0075
    assert data["tiers"]["onboard_ms"]["p50"] == 3
    assert "without_tiers" not in data


def test_without_tiers_nothing_speaks_of_them(tmp_path: Path) -> None:
    data = BARE.to_dict()
    assert "tiers" not in data
    assert not any(key.startswith("tiers") for key in data["definitions"])
    assert "KV tier" not in printed(BARE)
    text = page(BARE)
    assert not any(f"<h2>{title}</h2>" in text for title in (*PLOTS, "KV tiers"))
    BARE.requests_jsonl(tmp_path / "requests.jsonl")
    assert "parked_ms" not in (tmp_path / "requests.jsonl").read_text()


def test_rows_tell_where_a_prompt_came_from(tmp_path: Path) -> None:
    REPORT.requests_jsonl(tmp_path / "requests.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    parts = ("prompt_from_g1", "prompt_from_g2", "prompt_from_g3", "prompt_from_g4", "prompt_computed")
    assert [[row[part] for part in parts] for row in rows] == [
        [0, 0, 0, 0, 100],
        [16, 48, 0, 0, 36],
        [0, 0, 32, 0, 68],
    ]
    assert [row["parked_ms"] for row in rows] == [0, 3, 5]
    assert [row["room_wait_ms"] for row in rows] == [0, 0, 7]


# --- table and page -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_table_has_a_section_for_tiers_that_fits(width: int) -> None:
    text = printed(REPORT, width)
    assert max(map(len, text.splitlines())) <= width
    for words in ("KV tier", "G1 → G2 × 2", "Parked, all requests", "Onboarded blocks", "Slow loads"):
        assert words in text, words
    assert "Failed loads" not in text  # none did
    assert re.search(r"G2 +16\.0 %", text)


def test_columns_of_tables_have_the_names_of_the_metrics() -> None:
    names = {metric.name for metric in TIER_METRICS}
    assert REPORT.tiers is not None
    for build in (build_tier_table, build_link_table):
        _, *columns = build(REPORT.tiers, 200).columns
        assert len(columns) >= 5
        assert {str(column.header) for column in columns} <= names
    for columns_of_page in (TIER_COLUMNS, LINK_COLUMNS):
        assert set(columns_of_page.values()) <= names
    facts = [label.removesuffix(", p50 / p99") for label, _ in list_tier_facts(REPORT.tiers)]
    assert set(facts) <= names


def test_the_page_has_a_plot_for_each_and_is_well_formed() -> None:
    text = page(REPORT, BARE)
    checker = checked(text)
    for title in (*PLOTS, "KV tiers"):
        assert f"<h2>{title}</h2>" in text, title
    for data in checker.data:
        assert all(len(series["text"]) == len(data["px"]) for series in data["series"])
    for _, value in checker.attributes:
        assert not re.search(r"\b(nan|inf|None)\b", value)
    assert not re.search(r"\bnan\b", " ".join(checker.text))


def test_unlimited_links_are_plotted_in_bytes_a_second() -> None:
    columns = tiered().tiers
    assert columns is not None
    (free,) = (link for link in columns.links if math.isinf(link.bandwidth_gbps))
    text = page(Report.build(tiered(links=(free,))))
    assert "all links of a kind, unlimited" in text
    assert "GB/s" in text


def test_a_comparison_has_the_attainment_of_a_run_with_goals() -> None:
    with_goals = replace(REPORT, goodput=Goodput(Slo(ttft_ms=9), 3, 0.25, 1.0, 1.0))
    without = replace(with_goals, goodput=Goodput(Slo(ttft_ms=9), 6, 0.5, 1.0, 1.0))
    for report, shown in ((with_goals, 1), (REPORT, 0)):
        table = build_comparison(report, without, 100)
        console = Console(file=io.StringIO(), width=100)
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
        assert len(re.findall(r"SLO attainment +25\.0 % +50\.0 % +-25\.0 points", text)) == shown


def test_a_comparison_shows_both_and_the_difference(tmp_path: Path) -> None:
    without = Report.build(timeline(Row([40, 80], prompt_tokens=100), evictions=3), RunFacts(workload="bare"))
    report = replace(REPORT, without_tiers=without)
    text = printed(report)
    assert re.search(r"with tiers +without +difference", text)
    assert re.search(r"Prefix hit, first +32\.0 % +0\.0 % +\+32\.0 points", text)
    assert re.search(r"TTFT, mean \(ms\) +36\.67 +40\.00 +-8\.3 %", text)
    data = report.to_dict()
    assert data["without_tiers"]["ttft_ms"]["mean"] == 40
    assert "definitions" not in data["without_tiers"]
    report.to_html(tmp_path / "report.html")
    assert "compared with <b>bare</b>" in (tmp_path / "report.html").read_text()


def test_sizes_are_written_in_powers_of_a_thousand() -> None:
    assert [size(n) for n in (0, 999, 1000, 1_500_000, 42e9, 3e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "1.5 MB",
        "42 GB",
        "3 TB",
    ]

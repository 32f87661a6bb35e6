"""The report of prefill and decode workers: pools, links, blocks kept for others, on terminal, page and in JSON."""

from __future__ import annotations

import dataclasses
import json
import random
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rich.console import Console

from replay.test_disaggregation import make_workload, run
from understudy.report.handoff_metrics import HANDOFF_METRICS
from understudy.report.handoff_table import list_handoff_facts
from understudy.report.report import Report
from understudy.report.series import covered_ns

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.report.handoff import HandOffReport


def build(tmp_path: Path, **how: Any) -> tuple[Report, HandOffReport]:
    """Run 2 prefill and 2 decode workers; return the report, and its part about hand-offs."""
    found = run(make_workload(tmp_path, 9, requests=60, gap_ms=10.0), **how)
    report = Report.build(found.timeline, found.facts)
    assert report.handoff is not None
    return report, report.handoff


def cover(intervals: list[tuple[int, int]]) -> int:
    """Time in which at least one interval is open, one after another."""
    covered, reached = 0, -1
    for begin, end in sorted(intervals):
        covered += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


@pytest.mark.parametrize("seed", range(5))
def test_time_that_overlapping_intervals_cover_counts_once(seed: int) -> None:
    draw = random.Random(seed)
    begin = [draw.randrange(200) for _ in range(40)]
    spans = [(at, at + draw.randrange(1, 30)) for at in begin]
    group = [draw.randrange(3) for _ in spans]
    columns = np.array(spans, np.int64)
    found = covered_ns(columns[:, 0], columns[:, 1], np.array(group, np.int32), 4)
    assert found.tolist() == [
        cover([span for span, of in zip(spans, group, strict=True) if of == one]) for one in range(4)
    ]


def test_intervals_cover_nothing_if_there_are_none() -> None:
    none = np.zeros(0, np.int64)
    assert covered_ns(none, none, none.astype(np.int32), 2).tolist() == [0.0, 0.0]


def test_links_report_their_share_of_bytes_and_time(tmp_path: Path) -> None:
    report, handoff = build(tmp_path, link_gbps=0.002, backend_gbps=0.003, link_latency_ms=1.0)
    timeline, columns = report.columns, report.columns.handoff
    assert columns is not None
    out, into, backend = handoff.links
    assert [link.name for link in handoff.links] == ["prefill out", "decode in", "backend"]
    assert [link.links for link in handoff.links] == [2, 2, 1]
    assert [link.bandwidth_gbps for link in handoff.links] == [0.002, 0.002, 0.003]
    duration_ns = timeline.end_ns - timeline.start_ns
    for link in handoff.links:
        assert link.bytes == handoff.bytes
        assert link.transfers == handoff.remote
        moved = link.bytes / (link.bandwidth_gbps * duration_ns * link.links)
        assert link.utilisation_mean == pytest.approx(moved, rel=0.02)
        assert link.utilisation_mean <= link.utilisation_max <= link.busy * 2
        assert link.utilisation_mean <= link.peak <= 1 + 1e-9
    flowing = columns.posted_ns + 1_000_000
    for link, worker in ((out, columns.prefill_worker), (into, timeline.worker)):
        busy = [
            cover(list(zip(flowing[worker == one].tolist(), columns.landed_ns[worker == one].tolist())))  # noqa: B905
            for one in set(worker.tolist())
        ]
        assert link.busy == pytest.approx(sum(busy) / 2 / duration_ns, rel=1e-3)
    whole = cover(list(zip(flowing.tolist(), columns.landed_ns.tolist(), strict=True)))
    assert backend.busy == pytest.approx(whole / duration_ns)


def test_links_without_a_limit_have_no_share(tmp_path: Path) -> None:
    _, handoff = build(tmp_path)
    assert [link.name for link in handoff.links] == ["prefill out", "decode in"]
    assert all(np.isnan([link.utilisation_mean, link.peak]).all() for link in handoff.links)


def test_pools_report_how_long_their_workers_are_busy(tmp_path: Path) -> None:
    report, handoff = build(tmp_path, link_gbps=0.002, rule="uncached:64")
    timeline, columns = report.columns, report.columns.handoff
    assert columns is not None
    duration_ns = timeline.end_ns - timeline.start_ns
    prefill, decode = handoff.pools
    assert (prefill.role, prefill.workers, decode.role, decode.workers) == ("prefill", 2, "decode", 2)
    spans: dict[int, list[tuple[int, int]]] = {worker: [] for worker in range(4)}
    for row in range(len(timeline)):
        begin = int(timeline.first_admit_ns[row])
        if (worker := int(columns.prefill_worker[row])) >= 0:
            spans[worker].append((int(columns.prefill_admit_ns[row]), int(columns.prefill_done_ns[row])))
            begin = int(columns.decode_admit_ns[row])
        spans[int(timeline.worker[row])].append((begin, int(timeline.finish_ns[row])))
    shares = [cover(spans[worker]) / duration_ns for worker in range(4)]
    assert prefill.busy_mean == pytest.approx(np.mean(shares[:2]))
    assert prefill.busy_max == pytest.approx(max(shares[:2]))
    assert decode.busy_mean == pytest.approx(np.mean(shares[2:]))
    assert 0 < prefill.busy_mean < 1
    assert decode.held_max == 0


def test_a_prefill_worker_without_requests_counts_as_one(tmp_path: Path) -> None:
    """The pools are known from the settings, not from the requests."""
    found = run(make_workload(tmp_path, 9, requests=1), prefill_workers=3, decode_workers=1)
    handoff = Report.build(found.timeline, found.facts).handoff
    assert handoff is not None
    assert [pool.workers for pool in handoff.pools] == [3, 1]


def test_kept_blocks_over_time_have_the_mean_of_the_run(tmp_path: Path) -> None:
    _, handoff = build(tmp_path, link_gbps=0.0005)
    assert np.mean(handoff.window_held) == pytest.approx(handoff.pools[0].held_mean)
    assert max(handoff.window_held) <= handoff.pools[0].held_max
    assert handoff.window_s * len(handoff.window_held) > 0


def test_every_number_of_hand_offs_in_the_json_has_a_definition(tmp_path: Path) -> None:
    report, _ = build(tmp_path, link_gbps=0.002, backend_gbps=0.003)
    written = json.loads(report.to_json())
    keys = set()
    for name, value in written["handoff"].items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            keys |= {f"handoff.{name}[].{field}" for field in value[0] if field not in ("role", "name")}
        else:
            keys.add(f"handoff.{name}")
    assert keys == {metric.key for metric in HANDOFF_METRICS}
    assert keys <= set(written["definitions"])


def test_the_terminal_shows_pools_links_and_parts_of_the_ttft(tmp_path: Path) -> None:
    report, handoff = build(tmp_path, link_gbps=0.002, backend_gbps=0.003)
    out = StringIO()
    report.print(Console(file=out, width=100))
    text = out.getvalue()
    for words in ("prefill queue", "first step", "prefill × 2", "decode × 2", "kept for others"):
        assert words in text
    for words in ("hand-off, prefill out × 2", "hand-off, decode in × 2", "hand-off, backend"):
        assert words in text
    assert f"{handoff.remote:,} requests" in text


@pytest.mark.parametrize(
    "how", [{}, {"link_gbps": 0.002, "backend_gbps": 0.003}], ids=["unlimited", "limited"]
)
def test_the_page_plots_parts_kept_blocks_and_links(tmp_path: Path, how: dict[str, float]) -> None:
    report, _ = build(tmp_path, **how)
    page = report.to_html()
    for title in ("TTFT of handed-off requests", "Blocks kept for decode workers", "Links of hand-offs"):
        assert f"<h2>{title}</h2>" in page
    assert "<h2>Prefill and decode workers</h2>" in page
    assert "hand-off, prefill out × 2" in page


def test_the_page_plots_no_links_where_the_bytes_of_a_token_are_not_known(tmp_path: Path) -> None:
    report, handoff = build(tmp_path)
    page = dataclasses.replace(report, handoff=dataclasses.replace(handoff, bytes=0)).to_html()
    assert "<h2>Links of hand-offs</h2>" not in page
    assert '<section class="card full"><div class="head"><h2>Blocks kept for decode workers</h2>' in page


def test_the_page_of_a_run_without_hand_offs_plots_none(tmp_path: Path) -> None:
    report, handoff = build(tmp_path, rule="llm-d:0")
    assert handoff.remote == 0
    assert "TTFT of handed-off requests" not in report.to_html()
    assert "<h2>Prefill and decode workers</h2>" in report.to_html()


@pytest.mark.parametrize(
    ("link", "said"), [({}, "no time: links have no limit"), ({"link_gbps": 1.0}, "mean ")]
)
def test_free_transfers_name_the_missing_limit(link: dict[str, Any], said: str, tmp_path: Path) -> None:
    _, handoff = build(tmp_path, **link)
    assert dict(list_handoff_facts(handoff))["Transfer"].startswith(said)

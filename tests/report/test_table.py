from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from report.building import Row, crowd, timeline
from understudy.cli import main
from understudy.report import Report, Slo
from understudy.run.facts import RunFacts
from understudy.text import compact, duration, quantity, significant

CROWD = Report.build(crowd(400), RunFacts(digest="0123456789abcdef" * 4, wall_time_s=0.25), Slo(ttft_ms=500))


def printed(report: Report, width: int) -> str:
    out = io.StringIO()
    report.print(Console(file=out, width=width, highlight=False))
    return out.getvalue()


def test_a_wide_terminal_shows_every_statistic() -> None:
    text = printed(CROWD, 200)
    header = next(line for line in text.splitlines() if "avg" in line)
    assert header.split() == ["Metric", "avg", "min", "max", "p99", "p95", "p90", "p75", "p50", "std"]
    assert f"{CROWD.ttft_ms.p99:,.2f}" in text
    assert "Time to first token (TTFT, ms)" in text
    assert "percentiles exact, nearest rank" in text


@pytest.mark.parametrize("width", [60, 80, 100, 120, 140])
def test_a_narrow_terminal_drops_columns_and_wraps_nothing(width: int) -> None:
    lines = printed(CROWD, width).splitlines()
    assert max(map(len, lines)) <= width
    header = next(line for line in lines if "avg" in line).split()
    assert {"avg", "p99", "p50"} <= set(header)
    ttft = next(line for line in lines if "TTFT" in line)
    assert f"{CROWD.ttft_ms.mean:,.2f}" in ttft
    assert sum("TTFT" in line and "ms)" in line for line in lines) == 2  # from arrival, and from the queue
    assert "…" not in "".join(lines)


def test_the_digest_is_whole_however_narrow() -> None:
    assert "0123456789abcdef" * 4 in printed(CROWD, 40).replace("\n", "").replace(" ", "")


def test_a_run_without_requests_prints_dashes() -> None:
    text = printed(Report.build(timeline()), 120)
    assert "–" in text
    assert "nan" not in text


def test_what_went_wrong_is_in_the_summary_only_when_it_did() -> None:
    assert "Rejected" not in printed(Report.build(timeline(Row([10]))), 120)
    assert CROWD.requests.rejected
    assert "Rejected" in printed(CROWD, 120)


def test_the_report_is_computed_without_importing_rich() -> None:
    code = "import sys, understudy.report; assert not [m for m in sys.modules if m.split('.')[0] == 'rich']"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (compact(0.05), "0.05"),
        (compact(12.345), "12.3"),
        (compact(9_999), "9,999"),
        (compact(45_678), "45.7k"),
        (compact(1_234_567), "1.23M"),
        (compact(2e9), "2G"),
        (compact(-45_678), "-45.7k"),
        (significant(0), "0"),
        (significant(1234.5), "1,234"),
        (duration(0.00085), "850 µs"),
        (duration(0.0123), "12.3 ms"),
        (duration(4.5), "4.5 s"),
        (duration(725), "12 min 5 s"),
        (duration(12_000), "3 h 20 min"),
        (quantity(0.1234, "ratio"), "12.3 %"),
        (quantity(1234, "blocks"), "1,234"),
        (quantity(1234.5, "ms"), "1,234.50"),
    ],
)
def test_numbers_are_written_for_people(text: str, expected: str) -> None:
    assert text == expected


def test_the_blocks_of_a_worker_and_their_size_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    demo = str(Path(__file__).parents[2] / "examples" / "demo_trace.jsonl")
    gpu = ["replay", demo, "--model", "Qwen3-32B", "--gpu", "H200", "--no-advice"]
    assert main([*gpu, "--block-size", "64"]) == 0
    out = capsys.readouterr().out
    assert "4,074 of 64 tok" in out
    assert main(gpu) == 0
    out = capsys.readouterr().out
    assert "of 16 tok" in out
    assert "vLLM's default" not in out

"""Attainment and the worst hour follow from the records of single requests."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import understudy
from replay.building import single_turns
from understudy.cli import main
from understudy.engines.timing import Constant
from understudy.engines.vllm_config import VllmConfig
from understudy.report import Slo
from understudy.workload import Workload, write_mooncake

if TYPE_CHECKING:
    from pathlib import Path

HOUR_MS = 3_600_000.0
ENGINE = VllmConfig(num_gpu_blocks=200, timing=Constant(prefill_ms=2_000.0, decode_ms=500.0), max_num_seqs=4)


def make_day(hours: list[int], seed: int) -> Workload:
    """Requests by hour, at uneven distances within it."""
    arrivals = sorted(
        HOUR_MS * (hour + ((7 * place + seed) % 97 + place / count) / 98)
        for hour, count in enumerate(hours)
        for place in range(count)
    )
    prompts = [16 + (13 * place + seed) % 200 for place in range(len(arrivals))]
    return single_turns(prompts, 3, arrivals)


def read_rows(report: Any, path: Path) -> list[dict[str, Any]]:
    report.requests_jsonl(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_good(row: dict[str, Any], slo: Slo) -> bool:
    """Whether a request met its objectives, by their definition."""
    if row["status"] != "completed":
        return False
    limits = ((slo.ttft_ms, row["ttft_ms"]), (slo.itl_ms, row["tpot_ms"] or 0.0), (slo.e2e_ms, row["e2e_ms"]))
    return all(limit is None or value <= limit + 1e-6 for limit, value in limits)


def find_worst(rows: list[dict[str, Any]], slo: Slo | None, length_ms: float) -> dict[str, Any] | None:
    """Slide a window by quarters of its length over the arrivals and keep the worst, slowly and plainly."""
    arrived = [row for row in rows if row["arrival_ms"] is not None]
    first, last = (side(row["arrival_ms"] for row in arrived) for side in (min, max))
    if last - first < 2 * length_ms:
        return None
    step, found = length_ms / 4, []
    for place in range(math.floor((last - first) / step) - 2):
        start = first + place * step
        inside = [row for row in arrived if start <= row["arrival_ms"] < start + length_ms]
        if len(inside) >= 20:
            share = 1.0 if slo is None else sum(is_good(row, slo) for row in inside) / len(inside)
            found.append((share, -len(inside), place, inside))
    if not found:
        return None
    share, count, place, inside = min(found, key=lambda one: one[:3])
    ttft = sorted(row["ttft_ms"] for row in inside if row["ttft_ms"] is not None)
    return {
        "start_s": place * step / 1e3,
        "requests": -count,
        "attainment": None if slo is None else share,
        "ttft_p99_ms": ttft[math.ceil(0.99 * len(ttft)) - 1] if ttft else None,
    }


def check_day(hours: list[int], seed: int, slo: Slo | None, folder: Path) -> bool:
    report = understudy.replay(make_day(hours, seed), ENGINE, slo=slo)
    rows = read_rows(report, folder / "rows.jsonl")
    if slo is not None:
        assert report.goodput is not None
        assert report.goodput.ratio == pytest.approx(sum(is_good(row, slo) for row in rows) / len(rows))
    expected, found = find_worst(rows, slo, HOUR_MS), report.to_dict().get("worst_hour")
    if expected is None:
        assert found is None
        return False
    assert found is not None
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["requests_per_s"] == pytest.approx(expected["requests"] / 3600)
    return True


SLOS = st.sampled_from(
    [None, Slo(ttft_ms=3_000), Slo(itl_ms=900, e2e_ms=9_000), Slo(ttft_ms=2_500, itl_ms=700)]
)


@settings(max_examples=12)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=7), st.integers(0, 96), SLOS)
def test_the_worst_hour_is_that_of_the_records(
    tmp_path_factory: pytest.TempPathFactory, hours: list[int], seed: int, slo: Slo | None
) -> None:
    if sum(hours):
        check_day(hours, seed, slo, tmp_path_factory.mktemp("day"))


@pytest.mark.soak
@settings(max_examples=1_000)
@given(st.lists(st.integers(0, 400), min_size=2, max_size=26), st.integers(0, 96), SLOS)
def test_the_worst_hour_of_many_days_is_that_of_the_records(
    tmp_path_factory: pytest.TempPathFactory, hours: list[int], seed: int, slo: Slo | None
) -> None:
    if sum(hours):
        check_day(hours, seed, slo, tmp_path_factory.mktemp("day"))


PEAK = [40, 40, 40, 400, 40, 40]


def test_a_peak_that_the_whole_dilutes_is_in_every_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    trace, saved = tmp_path / "day.jsonl", tmp_path / "sweep.json"
    write_mooncake(make_day(PEAK, 3), trace)
    timing = "engine.timing={kind: constant, prefill_ms: 24000, decode_ms: 500}"
    fleet = ["--set", timing, "--trace-block-size", "16", "--max-num-seqs", "4"]
    goal = ["--slo-ttft-ms", "60000", "--goal", "0.5"]
    argv = [str(trace), *fleet, *goal]
    assert main(["replay", *argv[:-2], "--no-advice"]) == 0
    assert "Worst hour" in capsys.readouterr().out
    page = tmp_path / "sweep.html"
    assert main(["sweep", *argv, "--vary", "workers=1..4", "--json", str(saved), "--html", str(page)]) == 0
    whole = json.loads(saved.read_text())["answers"][0]["best"]
    said = capsys.readouterr().out
    assert "worst hour" in said
    assert "the goal does not hold in it" in said
    assert "Worst hour: from" in page.read_text()
    assert whole["good"] >= 0.5 > whole["worst_hour"]["attainment"]
    windowed = ["sweep", *argv, "--vary", "workers=1..4", "--goal-window", "1h", "--json", str(saved)]
    assert main([*windowed, "--html", str(page)]) == 0
    assert "% of requests in the worst window of 1 h" in page.read_text()
    held = json.loads(saved.read_text())["answers"][0]["best"]
    assert held["gpus"] > whole["gpus"]
    assert held["worst_hour"]["attainment"] >= 0.5
    assert "in every window of 1 h" in capsys.readouterr().out


def test_a_window_that_the_trace_does_not_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "day.jsonl"
    write_mooncake(make_day([30, 30, 30], 3), trace)
    argv = ["sweep", str(trace), "--vary", "workers=1,2", "--slo-ttft-ms", "500", "--quiet"]
    for window, problem in (
        ("2h", "the trace spans"),
        ("0h", "--goal-window"),
        ("soon", "--goal-window"),
        ("nan", "--goal-window"),
    ):
        assert main([*argv, "--goal-window", window]) == 2
        assert problem in capsys.readouterr().err


def test_a_comparison_has_the_worst_hour_of_each_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    slo, paths = Slo(ttft_ms=2_000), []
    load = make_day([20, 60, 20], 1)
    expected = []
    for workers in (1, 2):
        report = understudy.replay(load, ENGINE, workers=workers, slo=slo)
        paths.append(str(tmp_path / f"{workers}.json"))
        report.to_json(paths[-1])
        worst = find_worst(read_rows(report, tmp_path / "rows.jsonl"), slo, HOUR_MS)
        assert worst is not None
        expected.append(worst)
    assert main(["compare", *paths]) == 0
    lines = capsys.readouterr().out.splitlines()
    (attained,) = [line for line in lines if line.strip().startswith("Worst hour, SLO attainment")]
    for worst in expected:
        assert f"{100 * worst['attainment']:.1f} %" in attained
    (tail,) = [line for line in lines if line.strip().startswith("Worst hour, TTFT p99")]
    for worst in expected:
        assert f"{worst['ttft_p99_ms']:,.2f}" in tail

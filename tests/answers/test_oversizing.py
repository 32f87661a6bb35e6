"""A fleet that is too large is called so first, whether or not there was time to replay a smaller one."""

from __future__ import annotations

import functools
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest

import understudy
from replay.building import single_turns
from understudy.cli import main
from understudy.report import Slo, advise
from understudy.report.verdicts import find_verdicts
from understudy.workload import (
    Normal,
    Poisson,
    SharedRatio,
    SyntheticSpec,
    Workload,
    synthesise,
    write_mooncake,
)

if TYPE_CHECKING:
    from pathlib import Path

SLO = Slo(ttft_ms=2_000, itl_ms=60)
FLAGS = ["--model", "Llama-3.1-8B", "--gpu", "H100", "--slo-ttft-ms", "2000", "--slo-itl-ms", "60", "--quiet"]


def make_load(qps: float, seed: int) -> Workload:
    return synthesise(
        SyntheticSpec(
            sessions=150,
            prompt_tokens=Normal(mean=1500, std=500),
            output_tokens=Normal(mean=80, std=30),
            arrivals=Poisson(qps=qps),
            prefixes=SharedRatio(groups=3, ratio=0.3),
            content_seed=seed,
            arrival_seed=seed,
        )
    )


def make_day(hours: list[int], seed: int) -> Workload:
    """Requests by hour, at uneven distances within it."""
    arrivals = sorted(
        3_600_000.0 * (hour + ((7 * place + seed) % 97 + place / count) / 98)
        for hour, count in enumerate(hours)
        for place in range(count)
    )
    return single_turns([1_000 + place % 500 for place in range(len(arrivals))], 100, arrivals)


def replay(trace: Path, workers: int, folder: Path, *more: str) -> dict[str, Any]:
    saved = folder / f"{workers}.json"
    argv = ["replay", str(trace), "--workers", str(workers), *FLAGS]
    assert main([*argv, *more, "--json", str(saved)]) == 0
    content: dict[str, Any] = json.loads(saved.read_text())
    return content


@pytest.mark.parametrize("limit_s", [10.0, 0.0], ids=["replayed", "estimated"])
@pytest.mark.parametrize(("qps", "workers"), [(2.0, 4), (4.0, 8), (30.0, 2), (60.0, 4)])
def test_a_fleet_of_which_half_does_is_oversized(
    qps: float, workers: int, limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advise.advise, "__kwdefaults__", {"limit_s": limit_s})
    trace = tmp_path / "trace.jsonl"
    write_mooncake(make_load(qps, workers), trace)
    half = replay(trace, workers // 2, tmp_path, "--no-advice")
    found = replay(trace, workers, tmp_path)
    rules = [verdict["rule"] for verdict in found["verdicts"]]
    half_does = half["goodput"]["ratio"] >= 0.99
    if limit_s:
        assert (rules[:1] == ["oversized"]) == half_does
    elif rules[:1] == ["oversized"]:  # an estimate: it may be silent, but not wrong
        assert half_does
        assert "estimate" in found["verdicts"][0]["remedy"]
    if qps < 5:  # four times too large, clear to see
        assert rules[:1] == ["oversized"]


def test_a_month_whose_peak_is_an_hour_is_judged_by_that_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setattr(advise.advise, "__kwdefaults__", {"limit_s": 0.0})
    trace = tmp_path / "day.jsonl"
    write_mooncake(make_day([20, 20, 600, 20, 20], 1), trace)
    argv = ["replay", str(trace), "--trace-block-size", "16", "--workers", "8", *FLAGS[:-1]]
    assert main(argv) == 0
    said = capsys.readouterr().out
    assert "No bottleneck found" not in said
    assert "Oversized: 4 of the 8 workers should do. In the worst hour" in said
    assert "--workers 4" in said


def test_a_verdict_does_not_depend_on_the_speed_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace.jsonl"
    write_mooncake(make_load(2.0, 4), trace)
    found = []
    for second_s in (0.0, 30.0):  # what a look at the clock takes
        clock = (second_s * looks for looks in itertools.count())
        monkeypatch.setattr("time.perf_counter", functools.partial(next, clock))
        report = replay(trace, 4, tmp_path)
        found.append((report["verdicts"], report["advice"]["trials"], report["advice"]["untried"]))
    assert found[0] == found[1]
    assert found[0][0][0]["rule"] == "oversized"


def test_a_trace_that_is_too_long_to_replay_is_so_on_every_machine(tmp_path: Path) -> None:
    day = make_day([40_000] * 2, 1)  # 80,000 requests of 1,250 prompt tokens and 100 output tokens on average
    trace = tmp_path / "day.jsonl"
    write_mooncake(day, trace)
    found = replay(trace, 64, tmp_path, "--trace-block-size", "16")
    tokens = int(day.prompt_tokens.sum())
    counted_s = (40_000 * len(day) + 500 * tokens / 16 + 600 * 100 * len(day)) / 1e9
    assert found["advice"]["replay_s"] == pytest.approx(counted_s)
    assert found["advice"]["limit_s"] == 10
    assert 10 / counted_s < 1
    assert found["advice"]["trials"] == []
    assert found["advice"]["untried"] > 0


def test_a_late_machine_is_the_first_verdict() -> None:
    report = understudy.replay(make_load(4.0, 1), slo=SLO)
    assert all(verdict.rule != "machine_late" for verdict in find_verdicts(report))
    for speed, late_ms in ((5.0, 1_500.0), (1.0, 900.0)):
        facts = {"online": True, "speedup": speed, "lateness_ms": late(late_ms)}
        first = find_verdicts(change(report, facts))[0]
        assert first.rule == "machine_late"
        assert "numbers are not the fleet's" in first.finding
        assert ("--clock-speed" in first.remedy) == (speed > 1)
    punctual = change(report, {"online": True, "speedup": 1.0, "lateness_ms": late(0.2)})
    assert all(verdict.rule != "machine_late" for verdict in find_verdicts(punctual))


def test_a_late_machine_is_named_above_the_numbers_and_crowns_no_winner() -> None:
    import io

    from rich.console import Console

    report = understudy.replay(make_load(4.0, 1))
    behind = change(report, {"online": True, "digest": "another", "lateness_ms": late(9_000.0)})
    out = io.StringIO()
    behind.print(Console(file=out, width=160))
    said = out.getvalue()
    assert said.index("This machine was late") < said.index("Time to first token")
    assert said.count("This machine was late") == 1
    assert "is best" not in understudy.compare(report, behind).conclusion()


def late(token_p99: float) -> dict[str, float]:
    return {"token_p50": 0.1, "token_p99": token_p99, "step_end_p99": 0.1, "client_first_token_p99": 0.2}


def change(report: Any, facts: dict[str, Any]) -> Any:
    from dataclasses import replace

    return replace(report, run=replace(report.run, **facts))

"""No output shows a millisecond without saying where it comes from."""

from __future__ import annotations

import csv
import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console

from calibrate import files
from calibrate.rows import ROW, STAGES, table
from calibrate.test_predict_recorded import run_file
from replay.building import single_turns
from report.building import Row, timeline
from timing.test_hardware import CALIBRATED
from understudy.api import replay
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.report import Report
from understudy.report.html import page
from understudy.run.facts import RunFacts
from understudy.timing.efficiencies import Efficiencies
from understudy.timing.physical import Domain

if TYPE_CHECKING:
    from pathlib import Path

PRESET = "preset: Llama-3.1-8B in bf16 (KV bf16) on H100, fitted: BLIS"
FITTED = "calibrated: Llama-3.1-8B in bf16 on 1 × H100"
UNNAMED = "times from an unnamed source"
ON_H100 = ["--model", "Llama-3.1-8B", "--gpu", "H100"]
REQUESTS = [
    {"request_id": f"r{i}", "arrival_s": i / 10, "input_tokens": 500, "output_tokens": 8} for i in range(3)
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": 500, "output_length": 8, "hash_ids": [i]} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(text: str) -> str:
    """Without the line breaks and the frames that a console puts between."""
    return " ".join(re.sub("[│┃]", " ", text).split())


def test_a_replay_on_the_console_as_json_and_as_a_page(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, html = tmp_path / "report.json", tmp_path / "page.html"
    assert main(["replay", str(trace), *ON_H100, "--json", str(report), "--html", str(html)]) == 0
    assert f"Times from {PRESET}" in words(capsys.readouterr().out)
    assert json.loads(report.read_text())["run"]["times"]["from"].startswith(PRESET)
    assert f"times from {PRESET}" in html.read_text()


def test_a_comparison_on_the_console_and_as_a_page(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, html = tmp_path / "one.json", tmp_path / "two.json", tmp_path / "page.html"
    assert main(["replay", str(trace), *ON_H100, "--json", str(one), "--quiet"]) == 0
    assert main(["replay", str(trace), "--json", str(two), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["compare", str(one), str(two), "--html", str(html)]) == 0
    for said in (words(capsys.readouterr().out), html.read_text()):
        assert f"Times of one from {PRESET}" in said
        assert "Times of two from a generic polynomial" in said


def test_a_live_replay_and_its_steps_outside_of_the_fit(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timing, report = tmp_path / "timing.yaml", tmp_path / "report.json"
    nowhere = Domain(tokens=1, context_tokens=1)  # a step has either more tokens or more context
    timing.write_text(msgspec.structs.replace(CALIBRATED, domain=nowhere).text())
    flags = ["--timing", str(timing), "--online", "--clock-speed", "5", "--json", str(report)]
    assert main(["replay", str(trace), *flags]) == 0
    assert f"Times from {FITTED}" in words(capsys.readouterr().out)
    times = json.loads(report.read_text())["run"]["times"]
    assert times["from"].startswith(FITTED)
    assert times["outside_domain_share"] == 1


def test_a_report_in_python_at_a_prompt_in_a_notebook_and_beside_another() -> None:
    known = replay(single_turns([64], 4), VllmConfig())
    for said in (repr(known), known._repr_html_()):
        assert "times from a generic polynomial" in said
    nobody = Report.build(timeline(Row([10, 20])), RunFacts(workload="old"))
    for said in (repr(nobody), nobody._repr_html_(), page(nobody)):
        assert UNNAMED in said
    console = Console(width=200)
    with console.capture() as printed:
        console.print(nobody.table())
    assert UNNAMED.capitalize() in words(printed.get())
    assert f"its {UNNAMED}" in page(known, nobody)
    assert "its times from" not in page(known, known)


def test_a_fit_and_a_check_on_the_console_and_as_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = files.open_load(12)
    truth = Efficiencies(weights=0.8, compute=0.5, kv=0.8, front_end_ms=5.0)
    bench = files.vllm_detailed(tmp_path / "bench.json", load, files.measure(load, truth))
    timing, html = tmp_path / "timing.yaml", tmp_path / "page.html"
    out = ["-o", str(timing), "--html", str(html)]
    assert main(["calibrate", str(bench), *ON_H100, *out]) == 0
    assert f"times from {FITTED}" in words(capsys.readouterr().out)
    assert f"times from {FITTED}" in html.read_text()
    assert main(["calibrate", "check", str(bench), "--timing", str(timing), "--html", str(html)]) == 0
    assert f"times from {FITTED}" in words(capsys.readouterr().out)
    assert f"times from {FITTED}" in html.read_text()


def test_predictions_of_tables_by_row_and_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rough = {**ROW, "key": "b", "system": "a100", "osl": "4"}
    source = table(tmp_path / "closed.csv", {**ROW, "osl": "4"}, {**ROW, "key": "c", "osl": "4"}, rough)
    assert main(["predict", str(source)]) == 0
    printed = capsys.readouterr()
    assert len(list(csv.reader(printed.out.splitlines()))) == 4
    assert "times of 2 rows from preset, fitted: BLIS Llama-3.1-8B" in printed.err
    assert "times of 1 row from preset, rough: " in printed.err
    stages = table(tmp_path / "stages.csv", {**STAGES, "stage_seconds": "1 1", "max_tokens": "4"})
    assert main(["predict", str(stages)]) == 0
    assert "times of 1 row from preset, fitted: " in capsys.readouterr().err
    run = run_file(tmp_path / "run.jsonl", REQUESTS)
    assert main(["predict", str(run), *ON_H100]) == 0
    assert f"times from {PRESET}" in capsys.readouterr().err
    timing = tmp_path / "timing.yaml"
    timing.write_text(CALIBRATED.text())
    assert main(["predict", str(run), "--timing", str(timing)]) == 0
    assert f"times from {FITTED}" in capsys.readouterr().err

"""`understudy compare`: what differed between saved reports, and what came of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from understudy.cli import main
from understudy.report.compare import compare

TRACE = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("reports")
    paths = [folder / "one.json", folder / "two.json"]
    for path, workers in zip(paths, ("1", "2"), strict=True):
        argv = [
            "replay",
            str(TRACE),
            "--quiet",
            "--num-gpu-blocks",
            "600",
            "--workers",
            workers,
            "--json",
            str(path),
        ]
        assert main(argv) == 0
    return paths


def test_only_what_differed_is_shown(reports: list[Path]) -> None:
    assert compare(*reports).settings() == [("workers", [1, 2])]
    same = compare(reports[0], reports[0])
    assert same.settings() == []
    assert same.names == (str(reports[0]), str(reports[0]))


def test_numbers_are_those_of_the_reports_with_their_change(
    reports: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["compare", *map(str, reports)]) == 0
    out = capsys.readouterr().out
    one, two = (json.loads(path.read_text()) for path in reports)
    change = two["ttft_ms"]["mean"] / one["ttft_ms"]["mean"] - 1
    line = next(line for line in out.splitlines() if "(TTFT), mean" in line)
    assert f"{change:+.1%}".replace("%", " %") in line
    points = 100 * (two["prefix_hit_ratio"]["total"] - one["prefix_hit_ratio"]["total"])
    assert f"{points:+.1f} points" in next(line for line in out.splitlines() if "all admissions" in line)
    assert "workers" in out


def test_no_comparison_without_the_origin_of_its_times(reports: list[Path], tmp_path: Path) -> None:
    [line] = compare(*reports).times()
    assert line.startswith("Times from a generic polynomial")
    assert line in compare(*reports).to_html().replace("&#x27;", "'")
    changed: dict[str, Any] = json.loads(reports[0].read_text())
    changed["run"]["times"]["from"] = "preset: ours"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(changed))
    del changed["run"]["times"]
    silent = tmp_path / "silent.json"
    silent.write_text(json.dumps(changed))
    lines = compare(reports[0], other, silent).times()
    assert [line.partition(" from ")[0] for line in lines] == [
        f"Times of {path.stem}" for path in (reports[0], other, silent)
    ]
    assert lines[1].endswith("preset: ours")
    assert lines[2].endswith("an unnamed source")


def test_three_reports_are_compared_with_the_first(reports: list[Path], tmp_path: Path) -> None:
    changed: dict[str, Any] = json.loads(reports[0].read_text())
    changed["ttft_ms"]["mean"] *= 3
    third = tmp_path / "three.json"
    third.write_text(json.dumps(changed))
    rows = compare(*reports, third).metrics()
    values = next(values for label, _, values in rows if label.endswith("(TTFT), mean"))
    assert values[2] == pytest.approx(3 * values[0])


def test_the_page_stands_alone_and_escapes(reports: list[Path], tmp_path: Path) -> None:
    odd = tmp_path / "<b>.json"
    odd.write_bytes(reports[1].read_bytes())
    page = tmp_path / "page.html"
    assert main(["compare", str(reports[0]), str(odd), "--html", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert "://" not in text


def test_what_is_no_report_is_refused(
    reports: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    for content in ("{}", "[1", '{"schema": "else"}'):
        other.write_text(content)
        assert main(["compare", str(reports[0]), str(other)]) == 2
        assert "other.json" in capsys.readouterr().err
    assert main(["compare", str(reports[0])]) == 2
    assert "at least two reports" in capsys.readouterr().err
    assert main(["compare", *map(str, reports), "--html", str(reports[0])]) == 2
    assert "would overwrite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        ("schema", "understudy.report/9", "schema must be understudy.report/1, got 'understudy.report/9'"),
        ("run", "x", "run must be an object, got 'x'"),
        ("run", None, "run is missing"),
        ("run.times", [], "run.times must be an object, got []"),
        ("run.times.from", 3, "run.times.from must be text, got 3"),
        ("run.times.front_end_ms", "x", "run.times.front_end_ms must be a number, got 'x'"),
        ("run.engine", json.loads("[" * 150 + "]" * 150), "run has settings nested"),
        ("run.engine", -1, "run.engine must be an object, got -1"),
        ("run.digest", [], "run.digest must be text, got []"),
        ("run.notes", 5, "run.notes must be a list, got 5"),
        ("run.notes", [{}], "run.notes[0] must be text, got {}"),
        ("run.pools", [{"engine": 3}], "run.pools[0].engine must be an object, got 3"),
        ("ttft_ms.max", "x", "ttft_ms.max must be a number, got 'x'"),
        ("e2e_ms.p90", [], "e2e_ms.p90 must be a number, got []"),
        ("verdicts", "x", "verdicts must be a list, got 'x'"),
        ("verdicts", ["x"], "verdicts[0] must be an object, got 'x'"),
        ("verdicts", [{"finding": "f"}], "verdicts[0].remedy is missing"),
        ("ttft_ms", "x", "ttft_ms must be an object, got 'x'"),
        ("ttft_ms", {"mean": 1}, "ttft_ms.p50 is missing"),
        ("itl_ms.p99", True, "itl_ms.p99 must be a number, got True"),
        ("kv.evictions", 10**400, "kv.evictions must be at most 1e300, got "),
        ("preemptions", None, "preemptions is missing"),
        ("goodput", 3, "goodput must be an object, got 3"),
    ],
)
def test_a_field_that_no_report_has_so_is_refused_by_name(
    reports: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], at: str, value: Any, message: str
) -> None:
    changed: dict[str, Any] = json.loads(reports[1].read_text())
    *places, name = at.split(".")
    inside = changed
    for place in places:
        inside = inside[place]
    inside[name] = value
    other = tmp_path / "other.json"
    other.write_text(json.dumps(changed))
    assert main(["compare", str(reports[0]), str(other)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"understudy compare: report {other}: {message}")
    assert told.err.count("\n") == 1


def test_texts_of_a_report_cannot_act_on_the_terminal(
    reports: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed: dict[str, Any] = json.loads(reports[1].read_text())
    hostile = "\x1b]0;title\x07"
    changed["run"]["notes"] = [hostile]
    changed["run"]["times"]["from"] = hostile
    changed["run"]["engine"]["watermark"] = hostile
    changed["verdicts"] = [{"rule": "rejected", "finding": hostile, "remedy": hostile}]
    other = tmp_path / f"{hostile}.json"
    other.write_text(json.dumps(changed))
    assert main(["compare", str(reports[0]), str(other)]) == 0
    said = capsys.readouterr().out
    assert "\\x1b" in said
    assert "\x1b" not in said
    assert "\x07" not in said


def test_what_has_no_value_is_compared_as_such(reports: list[Path], tmp_path: Path) -> None:
    changed: dict[str, Any] = json.loads(reports[1].read_text())
    assert changed["goodput"] is None
    changed["itl_ms"] = dict.fromkeys(changed["itl_ms"])
    other = tmp_path / "other.json"
    other.write_text(json.dumps(changed))
    values = {path: values for path, _, _, values in compare(reports[0], other).rows()}
    assert math.isnan(values["itl_ms.mean"][1])
    assert "goodput.ratio" not in values


def test_what_a_run_has_beside_one_without_is_told_where_it_is_not_the_default(tmp_path: Path) -> None:
    paths = [tmp_path / "plain.json", tmp_path / "other.json"]
    more = (
        "--routing kv --event-delay-ms 50 --model Llama-3.1-8B --gpu H100 --g2 99 --set offload.min_reuse=2"
    )
    for path, flags in zip(paths, ("", more), strict=True):
        argv = ["replay", str(TRACE), "--quiet", "--workers", "2", "--json", str(path), *flags.split()]
        assert main(argv) == 0
    named = dict(compare(*paths).settings())
    assert named["routing"] == ["round_robin", "kv"]
    assert named["routing.event_delay_ms"] == [None, 50]
    assert named["tiers.offload.min_reuse"] == [None, 2]
    assert "preset: Llama-3.1-8B" in named["times.from"][1]
    others = {
        name for name in named if name.startswith(("routing.", "tiers.offload.", "router", "engine.timing."))
    }
    assert others == {
        *("routing.event_delay_ms", "tiers.offload.min_reuse"),
        *("engine.timing.kind", "engine.timing.front_end_ms"),
    }
    page = compare(*paths).to_html()
    assert 'class="delta good"' in page  # changes are coloured by whether they are welcome
    assert "expert_ms" not in page


def test_tiers_are_told_setting_by_setting(reports: list[Path], tmp_path: Path) -> None:
    paths = []
    for name, size in (("small", 1), ("large", 2)):
        report = json.loads(reports[0].read_text())
        report["run"]["tiers"] = {"tiers": [{"tier": "g2", "bytes": size}, {"tier": "g3", "bytes": 9}]}
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(report))
    assert compare(*paths).settings() == [("tiers.tiers.g2.bytes", [1, 2])]


def test_kv_groups_are_compared_by_their_settings_and_not_by_their_results(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.json", "two.json", "dense.json")]
    hybrid = "--model gpt-oss-120b --gpu H200"
    runs = (hybrid, f"{hybrid} --workers 2", "--model Llama-3.1-8B --gpu H200")
    for path, flags in zip(paths, runs, strict=True):
        argv = ["replay", str(TRACE), "--quiet", "--no-advice", "--json", str(path), *flags.split()]
        assert main(argv) == 0
    assert compare(*paths[:2]).settings() == [("workers", [1, 2])]
    named = dict(compare(paths[0], paths[2]).settings())
    groups = {name: values for name, values in named.items() if "group" in name}
    assert groups == {
        "engine.kv_cache_groups.0.kind": ["sliding_window", None],
        "engine.kv_cache_groups.0.block_size": [16, None],
        "engine.kv_cache_groups.0.window": [128, None],
        "engine.kv_cache_groups.1.kind": ["full", None],
        "engine.kv_cache_groups.1.block_size": [16, None],
    }

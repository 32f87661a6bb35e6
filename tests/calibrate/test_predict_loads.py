"""Loads that every verb reads: a benchmark's file, a recorded run, a trace, or lengths given as flags."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from calibrate import files
from calibrate.test_fit import TRUTH
from understudy.calibrate.load import build_load, random_lengths
from understudy.cli import main

WHERE = ["--model", "Llama-3.1-8B", "--gpu", "H100"]
SIZES = ["--max-num-seqs", str(files.SEQS), "--max-num-batched-tokens", str(files.BATCHED)]


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_lengths_and_a_concurrency_need_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for concurrency in (1, 64):
        load = ["--isl", "2000", "--osl", "300", "--concurrency", str(concurrency), "--least-length", "1"]
        assert main(["predict", *load, *WHERE]) == 0
        said = capsys.readouterr()
        [found[concurrency]] = rows(said.out)
        assert "TTFT and E2E include 6.1 ms between client and engine" in said.err
        assert "engine: max_num_seqs 1,024, max_num_batched_tokens 8,192, " in said.err
        assert " KV blocks of 16 tokens" in said.err
    assert list(found[1]) == ["benchmark", "ttft_ms", "tpot_ms", "e2e_ms"]
    assert found[64]["benchmark"] == "isl 2000, osl 300, concurrency 64, lengths all equal"
    assert float(found[64]["tpot_ms"]) > float(found[1]["tpot_ms"]) > 1
    row = {name: float(value) for name, value in found[1].items() if name != "benchmark"}
    assert row["e2e_ms"] == pytest.approx(row["ttft_ms"] + 299 * row["tpot_ms"], rel=0.001)


def test_one_output_token_has_no_time_per_output_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "--isl", "2000", "--osl", "1", "--concurrency", "4", *WHERE]) == 0
    [row] = rows(capsys.readouterr().out)
    assert row["tpot_ms"] == ""
    assert row["ttft_ms"] == row["e2e_ms"]
    load = build_load([500] * 20, [1] * 20, concurrency=4)
    bench = files.vllm_plain(tmp_path / "bench.json", load, files.measure(load, TRUTH), mean_tpot_ms=0.0)
    assert main(["predict", str(bench), *WHERE, *SIZES]) == 0
    said = capsys.readouterr()
    assert rows(said.out)[0]["tpot_ms"] == ""
    assert "TTFT" in said.err
    assert "TPOT" not in said.err.replace("range TPOT", "")  # of the model, whatever is asked
    html = tmp_path / "fit.html"
    fit = ["calibrate", str(bench), *WHERE, *SIZES, "-o", str(tmp_path / "timing.yaml"), "--html", str(html)]
    assert main(fit) == 0
    assert "<td>0.00</td><td>–</td><td>–</td>" in html.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "INPUTS is missing; give a file, or --isl, --osl and --concurrency"),
        (["--isl", "9", "--osl", "9"], "--concurrency is missing; give it"),
        (
            ["{run}", "--least-length", "0.8"],
            "--least-length is for random lengths, and INPUTS has exact ones",
        ),
        (
            ["--isl", "9", "--osl", "9", "--concurrency", "1", "--least-length", "2"],
            "--least-length must be a share above 0",
        ),
        (["--osl", "9", "--concurrency", "1"], "--isl is missing; give it"),
        (
            ["--isl", "9", "--osl", "9", "--concurrency", "1", "--trace-block-size", "64"],
            "--trace-block-size is for a trace; name the file",
        ),
        (["--isl", "0", "--osl", "9", "--concurrency", "1"], "--isl must be at least 1"),
        (["{run}", "--isl", "9"], "--isl describes a load, and INPUTS is one; leave out one of them"),
        (["{run}", "--num-prompts", "9"], "--num-prompts describes a load, and INPUTS is one"),
        (["{run}", "--concurrency", "9"], "--concurrency: INPUTS describes its own load; leave it out"),
    ],
)
def test_loads_that_are_missing_or_given_twice_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.jsonl"
    run.write_text('{"request_id": "a", "arrival_s": 0, "input_tokens": 9, "output_tokens": 3}\n')
    assert main(["predict", *(word.format(run=run) for word in words), *WHERE]) == 2
    assert message in capsys.readouterr().err


def test_lengths_may_be_random(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--isl", "2000", "--osl", "300", "--concurrency", "16", "--num-prompts", "64"]
    ttft = {}
    for least in ("1", "0.8"):
        assert main(["predict", *load, "--least-length", least, *WHERE]) == 0
        [row] = rows(capsys.readouterr().out)
        ttft[least] = float(row["ttft_ms"])
    assert ttft["0.8"] < 0.8 * ttft["1"]  # equal lengths keep their requests in step


def test_a_benchmark_that_calibrate_reads_is_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = files.open_load(30)
    seen = files.measure(load, TRUTH)
    closed = random_lengths(500, 50, least=0.8, concurrency=4, prompts=40, seed=3)
    paths = [
        files.vllm_detailed(tmp_path / "bench.json", load, seen),
        files.guidellm(tmp_path / "guidellm.json", load, seen),
        files.aiperf_records(tmp_path / "profile_export.jsonl", load, seen),
        files.own_requests(tmp_path / "requests.jsonl", load, seen),
        files.aiperf_summary(tmp_path / "summary.json", closed, files.measure(closed, TRUTH)),
    ]
    table = tmp_path / "summaries.csv"
    table.write_text("isl,osl,conc,mean_ttft_ms,mean_tpot_ms\n500,50,4,30,9\n900,50,8,30,9\n")
    first: dict[str, float] = {}
    for path in (*paths, table):
        assert main(["predict", str(path), *WHERE, *SIZES]) == 0
        said = capsys.readouterr()
        found = rows(said.out)
        means = ["ttft_ms", "tpot_ms", "e2e_ms"]
        assert list(found[0]) == ["benchmark", *means, *(f"measured_{name}" for name in means)]
        assert "means over requests, predicted / measured − 1: " in said.err
        assert [row["benchmark"] for row in found][:1] == [
            path.name if path is not table else "summaries.csv:2"
        ]
        assert len(found) == (2 if path is table else 1)
        if path in paths[:4]:  # the same requests
            numbers = {name: float(value) for name, value in found[0].items() if name != "benchmark"}
            first = first or numbers
            assert numbers == pytest.approx(first, rel=0.01)


def test_measured_means_stand_next_to_the_predicted_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = files.open_load(30)
    seen = files.measure(load, TRUTH)
    bench = files.vllm_detailed(tmp_path / "bench.json", load, seen)
    assert main(["predict", str(bench), *WHERE, *SIZES]) == 0
    said = capsys.readouterr()
    [row] = rows(said.out)
    off = []
    for name, title in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E")):
        assert float(row[f"measured_{name}"]) == pytest.approx(seen.mean(name), abs=1e-3)
        off.append(f"{title} {100 * (float(row[name]) / seen.mean(name) - 1):+.1f} %")
    assert f"predicted / measured − 1: bench.json {', '.join(off)}" in said.err
    table = tmp_path / "summaries.csv"
    table.write_text("isl,osl,conc,mean_ttft_ms,mean_tpot_ms\n500,50,4,30,9\n")
    assert main(["predict", str(table), *WHERE, *SIZES]) == 0
    [row] = rows(capsys.readouterr().out)
    assert (row["measured_ttft_ms"], row["measured_e2e_ms"]) == ("30.0000", "")


@pytest.mark.parametrize("name", ["vllm_bench.json", "profile_export.jsonl"])
def test_a_benchmark_without_measured_times_still_has_a_load(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).parents[2] / "examples" / "logs" / name
    assert main(["predict", str(path), *WHERE]) == 0
    said = capsys.readouterr()
    [row] = rows(said.out)
    assert list(row) == ["benchmark", "ttft_ms", "tpot_ms", "e2e_ms"]
    assert row["benchmark"] == name
    assert float(row["e2e_ms"]) > float(row["ttft_ms"]) > 0
    assert f"note: {name}: it has no measured times" in said.err


@pytest.mark.parametrize("name", ["azure", "burstgpt"])
def test_a_csv_of_lengths_is_no_table_of_experiments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "examples" / "logs" / f"{name}.csv"
    assert main(["predict", str(path), *WHERE]) == 2
    said = capsys.readouterr().err
    assert f"{name}.csv is no table of experiments; it looks like format {name}: give --format {name}" in said
    assert main(["predict", str(path), "--format", name, *WHERE]) == 0
    assert "means over 40 requests, at the client: TTFT " in capsys.readouterr().err


def test_settings_that_the_file_records_are_used_and_others_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = random_lengths(500, 50, least=1.0, concurrency=8, prompts=40, seed=3)
    seen = files.measure(load, TRUTH)
    slow, fast = (
        files.vllm_plain(tmp_path / f"{size}.json", load, seen, max_num_seqs=size, tensor_parallel_size="1")
        for size in ("1", "8")
    )
    ttft = {}
    for path in (slow, fast):
        assert main(["predict", str(path), *WHERE]) == 0
        [row] = rows(capsys.readouterr().out)
        ttft[path] = float(row["ttft_ms"])
    assert ttft[slow] > 2 * ttft[fast]
    assert main(["predict", str(slow), *WHERE, "--max-num-seqs", "8"]) == 2
    assert "--max-num-seqs: 1.json ran with 1, not 8; give --max-num-seqs 1" in capsys.readouterr().err
    assert main(["predict", str(slow), *WHERE, "--tensor-parallel-size", "2"]) == 2
    assert "give --tensor-parallel-size 1" in capsys.readouterr().err


def test_a_trace_is_predicted_request_by_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * n, "input_length": 600, "output_length": 9, "hash_ids": [0, n + 1]}
        for n in range(3)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["predict", str(trace), "--format", "mooncake", *WHERE]) == 0
    found = rows(capsys.readouterr().out)
    assert [row["request_id"] for row in found] == ["0", "1", "2"]
    assert float(found[1]["ttft_ms"]) < float(found[0]["ttft_ms"])  # its first block is cached
    assert main(["predict", str(trace), *WHERE]) == 2
    assert "looks like format mooncake (--format mooncake)" in capsys.readouterr().err


def test_replay_reads_benchmarks_and_recorded_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = files.open_load(20)
    bench = files.guidellm(tmp_path / "guidellm.json", load, files.measure(load, TRUTH))
    report = tmp_path / "report.json"
    assert main(["replay", str(bench), "--format", "benchmark", "--json", str(report)]) == 0
    assert json.loads(report.read_text())["requests"]["total"] == 20
    run = tmp_path / "run.jsonl"
    run.write_text('{"request_id": "a", "arrival_s": 0, "input_tokens": 9, "output_tokens": 3}\n')
    assert main(["replay", str(run), "--format", "benchmark", "--json", str(report)]) == 0
    content = json.loads(report.read_text())
    assert content["requests"]["completed"] == 1
    assert any("prefix caching is unknown" in note for note in content["run"]["notes"])
    closed = random_lengths(500, 50, least=0.8, concurrency=4, prompts=40, seed=3)
    summary = files.aiperf_summary(tmp_path / "summary.json", closed, files.measure(closed, TRUTH))
    assert main(["replay", str(summary), "--format", "benchmark", "--json", str(report)]) == 0
    assert json.loads(report.read_text())["run"]["load"]["concurrency"] == 4
    table = tmp_path / "summaries.csv"
    table.write_text("isl,osl,conc,mean_ttft_ms,mean_tpot_ms\n500,50,4,30,9\n900,50,8,30,9\n")
    capsys.readouterr()
    assert main(["replay", str(table), "--format", "benchmark"]) == 2
    assert "contains 2 benchmarks, and a replay has one load" in capsys.readouterr().err


def test_ranks_get_the_requests_that_a_replay_gives_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, report = tmp_path / "trace.jsonl", tmp_path / "report.json"
    lines = [
        {"timestamp": 15 * n, "input_length": 300 + 900 * (n % 3), "output_length": 4 + 9 * (n % 4)}
        | {"hash_ids": list(range(9 * n, 9 * n + 1 + 2 * (n % 3)))}
        for n in range(24)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [
        "--model",
        "Qwen3-30B-A3B",
        "--gpu",
        "H100",
        "--data-parallel-size",
        "2",
        "--enable-expert-parallel",
    ]
    assert main(["predict", str(trace), "--format", "mooncake", *flags]) == 0
    found = rows(capsys.readouterr().out)
    mean = sum(float(row["ttft_ms"]) for row in found) / len(found)
    replay = ["replay", str(trace), "--format", "mooncake", *flags, "--json", str(report), "--quiet"]
    assert main(replay) == 0
    assert mean == pytest.approx(json.loads(report.read_text())["ttft_ms"]["mean"], rel=1e-3)

"""`understudy replay`: what it prints and writes, and where its settings come from."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

import understudy
from cli.conftest import ROWS
from cli.replaying import arguments, refused, report_of
from understudy.cli import main
from workload.building import row, trace_file

if TYPE_CHECKING:
    from pathlib import Path


# ── Output ──


@pytest.mark.parametrize(
    "flags",
    [
        ["--routing", "random"],
        ["--routing", "power_of_two", "--workers", "2"],
        ["--routing", "kv"],
        ["--g2", "64", "--kv-bytes-per-token", "1024", "--set", "offload.onboard_failure_rate=0.5"],
    ],
)
def test_a_seed_is_taken_where_something_is_drawn(trace: Path, flags: list[str]) -> None:
    assert main(arguments(trace, "--quiet", "--seed", "3", *flags)) == 0


def test_the_table_shows_latencies_counts_and_the_digest(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(trace, "--workers", "2")) == 0
    out = capsys.readouterr().out
    for label in ("TTFT", "ITL", "E2E", "p99", "Completed requests", "Wall time", "Output throughput"):
        assert label in out, label
    assert f"{ROWS} of {ROWS}" in out
    assert re.search(r"Digest\s+[0-9a-f]{16}", out)


def test_the_digest_alone_can_be_printed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digests = set()
    for more in ([], ["--threads", "2"], ["--no-fast-forward"], ["--check"]):
        assert main(arguments(trace, "--workers", "2", "--digest", *more)) == 0
        out = capsys.readouterr().out
        assert re.fullmatch(r"[0-9a-f]{16}\n", out)
        digests.add(out)
    assert len(digests) == 1


def test_quiet_prints_nothing(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(trace, "--quiet")) == 0
    assert capsys.readouterr() == ("", "")


def test_the_json_report_tells_the_run_and_its_facts(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(tmp_path, trace, "--workers", "3", "--num-gpu-blocks", "500")
    run = report["run"]
    assert run["wall_time_s"] > 0
    assert run["workload"] == "trace.jsonl"
    assert run["workers"] == 3
    assert run["engine"]["num_gpu_blocks"] == 500
    assert report["requests"] == {
        "total": ROWS,
        "completed": ROWS,
        "stopped": 0,
        "length_capped": 40,
        "rejected": 0,
        "cancelled": 0,
        "failed": 0,
        "unfinished": 0,
    }
    assert report["ttft_ms"]["p50"] > 0
    capsys.readouterr()
    assert main(arguments(trace, "--workers", "3", "--num-gpu-blocks", "500", "--digest")) == 0
    assert run["digest"] == capsys.readouterr().out.strip()


def test_requests_are_written_a_line_each(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "requests.jsonl"
    assert main(arguments(trace, "--requests-jsonl", str(path))) == 0
    assert f"written: {path}" in capsys.readouterr().err
    requests = [json.loads(line) for line in path.read_text().splitlines()]
    assert [request["request"] for request in requests] == list(range(ROWS))
    assert all(request["status"] == "completed" for request in requests)
    assert all(request["first_token_ms"] > request["arrival_ms"] for request in requests)


def test_the_page_stands_alone(tmp_path: Path, trace: Path) -> None:
    path = tmp_path / "report.html"
    assert main(arguments(trace, "--quiet", "--html", str(path))) == 0
    page = path.read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert not re.search(r"(src|href)\s*=\s*[\"']https?:", page)


def test_goals_give_goodput(tmp_path: Path, trace: Path) -> None:
    assert report_of(tmp_path, trace)["goodput"] is None
    strict = report_of(tmp_path, trace, "--slo-ttft-ms", "0.001")
    assert strict["goodput"]["requests"] == 0
    loose = report_of(tmp_path, trace, "--slo-ttft-ms", "1e6", "--slo-itl-ms", "1e6", "--slo-e2e-ms", "1e6")
    assert loose["goodput"]["requests"] == ROWS


def test_python_replays_what_the_command_line_does(tmp_path: Path, trace: Path) -> None:
    report = understudy.replay(trace, workers=2, trace_options={"trace_block_size": 64})
    assert report.run.digest == report_of(tmp_path, trace, "--workers", "2")["run"]["digest"]
    assert len(report.columns.arrival_ns) == ROWS


# ── Settings ──


def test_a_file_gives_settings_flags_win_over_it_and_single_assignments_over_all(
    tmp_path: Path, trace: Path
) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text(
        "workers: 2\nrouting: random\nseed: 5\n"
        "engine: {block_size: 32, num_gpu_blocks: 700, max_num_seqs: 9,"
        " timing: {kind: constant, prefill_ms: 2, decode_ms: 1}}\n"
    )
    run = report_of(tmp_path, trace, "--config", str(config))["run"]
    assert (run["workers"], run["routing"], run["seed"]) == (2, "random", 5)
    assert run["engine"]["block_size"] == 32
    assert run["engine"]["timing"] == {"kind": "constant", "prefill_ms": 2.0, "decode_ms": 1.0}

    flags = ["--config", str(config), "--workers", "3", "--block-size", "16", "--max-num-seqs", "7"]
    run = report_of(tmp_path, trace, *flags)["run"]
    assert (run["workers"], run["routing"]) == (3, "random")
    assert (run["engine"]["block_size"], run["engine"]["num_gpu_blocks"]) == (16, 700)

    assignments = ["--set", "workers=4", "--set", "engine.max_num_seqs=6", "--set", "engine.watermark=0.25"]
    run = report_of(tmp_path, trace, *flags, *assignments)["run"]
    assert run["workers"] == 4
    assert (run["engine"]["max_num_seqs"], run["engine"]["watermark"]) == (6, 0.25)
    assert run["engine"]["block_size"] == 16


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--concurrency", "4"], {"kind": "closed_loop", "concurrency": 4}),
        (["--arrival-rate-scale", "2.5"], {"kind": "open_loop", "arrival_rate_scale": 2.5}),
        ([], {"kind": "open_loop", "arrival_rate_scale": 1.0}),
        (["--set", "load={kind: closed_loop, concurrency: 2}"], {"kind": "closed_loop", "concurrency": 2}),
    ],
)
def test_the_load_is_open_or_closed(
    tmp_path: Path, trace: Path, flags: list[str], expected: dict[str, Any]
) -> None:
    assert report_of(tmp_path, trace, *flags)["run"]["load"] == expected


def test_a_flag_for_another_load_replaces_that_of_the_file(tmp_path: Path, trace: Path) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text("load: {kind: open_loop, arrival_rate_scale: 3}\n")
    run = report_of(tmp_path, trace, "--config", str(config), "--concurrency", "2")["run"]
    assert run["load"] == {"kind": "closed_loop", "concurrency": 2}


@pytest.mark.parametrize("value", ["1e-2", "1E-2", ".1e-1", "0.01"])
def test_a_number_with_an_exponent_is_a_number(tmp_path: Path, trace: Path, value: str) -> None:
    path = tmp_path / "report.json"
    assert main(arguments(trace, "--quiet", "--json", str(path), "--set", f"engine.watermark={value}")) == 0
    assert json.loads(path.read_text())["run"]["engine"]["watermark"] == 0.01


def test_prompts_and_hash_ids_that_do_not_fit_each_other_can_be_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n')
    assert "--clamp-input-length" in refused(capsys, ["replay", str(path)])
    assert main(["replay", str(path), "--quiet", "--clamp-input-length"]) == 0
    path.write_text('{"timestamp": 0, "input_length": 60, "output_length": 1, "hash_ids": [1, 2]}\n')
    assert "--drop-surplus-hash-ids" in refused(capsys, ["replay", str(path)])
    assert main(["replay", str(path), "--quiet", "--drop-surplus-hash-ids"]) == 0


def test_an_empty_file_changes_nothing(tmp_path: Path, trace: Path) -> None:
    config = tmp_path / "empty.yaml"
    config.write_text("# nothing yet\n")
    assert report_of(tmp_path, trace, "--config", str(config))["run"]["workers"] == 1


@pytest.mark.parametrize("how", [["--kv-manager", "kvbm"], ["--set", "engine.g1_backend=kvbm"]])
def test_the_kv_manager_is_a_choice(tmp_path: Path, trace: Path, how: list[str]) -> None:
    report = report_of(tmp_path, trace, *how, "--eviction-policy", "lru", "--check")
    assert report["run"]["engine"]["kv_manager"] == "kvbm"
    assert report["run"]["engine"]["eviction_policy"] == "lru"


def test_events_and_allocations_are_written_a_line_each(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / name for name in ("events.jsonl", "raw.jsonl", "kv.jsonl")]
    flags = [["--events", str(paths[0])], ["--raw-events", str(paths[1])], ["--kv-trace", str(paths[2])]]
    assert main(arguments(trace, *(word for flag in flags for word in flag))) == 0
    said = capsys.readouterr().err
    for path in paths:
        assert f"written: {path}" in said
        assert all({"time_ns", "worker"} < json.loads(line).keys() for line in path.read_text().splitlines())
        assert path.read_text()


def test_rejected_requests_are_reported_and_the_run_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace_file(tmp_path, row(), row(input_length=1024, timestamp=1))
    requests = tmp_path / "requests.jsonl"
    argv = ["replay", str(path), "--num-gpu-blocks", "40", "--requests-jsonl", str(requests)]
    assert main(argv) == 0
    assert "Rejected" in capsys.readouterr().out
    statuses = [json.loads(line) for line in requests.read_text().splitlines()]
    assert [request["status"] for request in statuses] == ["completed", "rejected"]
    assert "num_gpu_blocks=40" in statuses[1]["reason"]


def test_a_run_without_progress_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(input_length=16, output_length=30, hash_ids=[i]) for i in range(2)]
    path = trace_file(tmp_path, *rows)
    settings = (
        "{block_size: 4, num_gpu_blocks: 12, max_num_batched_tokens: 20, enable_chunked_prefill: false}"
    )
    argv = ["replay", str(path), "--set", f"engine={settings}", "--set", "engine.enable_prefix_caching=false"]
    assert "the run makes no progress" in refused(capsys, argv)


def test_help_names_every_group_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["replay", "--help-all"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    for flag in ("--workers", "--set", "--json", "--html", "--requests-jsonl", "--digest", "--threads"):
        assert flag in out

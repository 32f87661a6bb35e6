"""`understudy replay`: what it prints and writes, where its settings come from, and what it refuses."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

import understudy
from understudy.cli import main
from understudy.workload import Normal, Poisson, SharedRatio, SyntheticSpec, synthesise, write_mooncake
from workload.building import row, trace_file

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 40


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trace with blocks of 64."""
    spec = SyntheticSpec(
        sessions=ROWS,
        prompt_tokens=Normal(mean=300, std=100),
        output_tokens=Normal(mean=20, std=5),
        arrivals=Poisson(qps=20),
        prefixes=SharedRatio(groups=3, ratio=0.5),
    )
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    write_mooncake(synthesise(spec).normalised(), path)
    return path


def arguments(trace: Path, *more: str) -> list[str]:
    return ["replay", str(trace), "--trace-block-size", "64", *more]


def report_of(tmp_path: Path, trace: Path, *more: str) -> dict[str, Any]:
    """The JSON report of a run."""
    path = tmp_path / "report.json"
    assert main(arguments(trace, "--quiet", "--json", str(path), *more)) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The message of a command line that ends with exit code 2, in one line and without a traceback."""
    capsys.readouterr()
    assert main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("understudy replay: ")
    assert "Traceback" not in said.err
    return said.err


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


# ── Refusals ──


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "engine.blok_size=3"], "blok_size is not a setting of the engine"),
        (["--set", "wrokers=3"], "wrokers is not a setting of a replay"),
        (["--set", "engine.worker_type=prefill"], "worker_type belongs to disaggregation"),
        (["--set", "engine.block_size=many"], "block_size"),
        (["--set", "engine.block_size=0"], "block_size must be at least 1"),
        (["--set", "engine=5"], "engine"),
        (["--set", "workers=two"], "workers"),
        (["--set", "workers"], "a.b=value"),
        (["--set", "=3"], "a.b=value"),
        (["--set", "engine..x=3"], "a.b=value"),
        (["--set", "workers=[1"], "workers=[1"),
        (["--workers", "0"], "workers must be at least 1"),
        (["--routing", "kv_router"], "write kv"),
        (["--event-delay-ms", "5"], "--event-delay-ms is for routing kv, but routing is round_robin"),
        (["--routing", "kv", "--event-loss", "2"], "--event-loss must be from 0 to below 1"),
        (["--routing", "fair"], "choose one of round_robin, random, least_loaded"),
        (["--set", "routing=[1]"], "routing [1] is not known"),
        (["--num-gpu-blocks", "0"], "--num-gpu-blocks must be at least 1"),
        (["--vllm-version", "v9"], "--vllm-version 'v9' is not known"),
        (
            ["--vllm-version", "v0.23", "--set", "engine.watermark=0.1"],
            "watermark is not a setting of vLLM v0.23",
        ),
        (
            ["--set", "engine.scheduling_policy=priority", "--set", "engine.preemption_mode=fifo"],
            "preemption_mode=fifo contradicts scheduling_policy=priority",
        ),
        (["--set", "engine.speedup_ratio=0"], "speedup_ratio must be finite and positive"),
        (["--set", "engine.timing={kind: linear}"], "timing"),
        (["--set", "engine.timing={kind: interpolated, path: nowhere.npz}"], "nowhere.npz"),
        (["--concurrency", "0"], "concurrency must be at least 1, got 0"),
        (["--concurrency", "2", "--arrival-rate-scale", "2"], "--arrival-rate-scale contradicts concurrency"),
        (["--arrival-rate-scale", "0"], "--arrival-rate-scale must be a finite number above 0"),
        (["--threads", "2", "--routing", "least_loaded"], "threads > 1 needs independent workers"),
        (["--threads", "2", "--concurrency", "3"], "threads > 1 needs independent workers"),
        (["--threads", "0"], "threads"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--format", "csv"], "csv"),
        (["--slo-ttft-ms", "-1"], "--slo-ttft-ms must be"),
        (["--seed", "-1"], "seed"),
        (["--eviction-policy", "magic"], "--eviction-policy 'magic' is not known; choose one of lineage"),
        (["--kv-manager", "pages"], "--kv-manager must be one of"),
        (["--kv-offloading-backend", "lmcache"], "--kv-offloading-backend needs --kv-offloading-size"),
        (
            ["--timing", "aiconfigurater"],
            "--timing aiconfigurater: no such file or folder; names are",
        ),
        (["--clock-speed", "10"], "--clock-speed needs --online"),
        (["--online", "--clock-speed", "0"], "--clock-speed must be positive, got 0"),
        (["--online", "--clock-speed", "nan"], "--clock-speed must be positive, got nan"),
        (["--online", "--check"], "--check is for offline runs"),
        (["--online", "--threads", "2"], "--threads is for offline runs"),
        (["--online", "--set", "pools=[{workers: 2}]"], "pools are for offline runs"),
    ],
)
def test_a_bad_setting_is_one_message_that_names_it(
    trace: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert message in refused(capsys, arguments(trace, *more))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("engine: [1, 2]\n", "engine"),
        ("- 1\n", "top level"),
        ("workers: {a: 1}\n", "workers"),
        ("a: [1\n", "fleet.yaml"),
        ("engine: {g1_backend: pages}\n", "g1_backend must be native or kvbm"),
        ("engine: {g1_backend: kvbm, kv_manager: kvbm}\n", "g1_backend and kv_manager"),
        ("engine: {eviction_policy: [lru]}\n", "eviction_policy must be a name"),
        ("engine: {kv_manager: kvbm, eviction_policy: magic}\n", "eviction_policy"),
        ("load: {kind: open_loop, concurrency: 3}\n", "concurrency"),
        ("1: 2\n", "1 is not a setting"),
        ("engine: {block_size: 16, block_size: 32}\n", "block_size is given twice"),
        ("workers: 1\nworkers: 2\n", "workers is given twice"),
    ],
)
def test_a_bad_settings_file_is_one_message(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text(content)
    assert message in refused(capsys, arguments(trace, "--config", str(config)))


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


def test_a_settings_file_that_is_no_text_is_one_message(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_bytes(b"\xff\xfe\x00")
    assert "fleet.yaml" in refused(capsys, arguments(trace, "--config", str(config)))


def test_a_bad_line_of_the_trace_is_named_by_its_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace_file(tmp_path, row(), row(timestamp=5), row(output_length="many"), row())
    message = refused(capsys, ["replay", str(path)])
    assert "trace.jsonl" in message
    assert re.search(r"\b3\b", message)
    assert "output_length" in message


def test_a_missing_trace_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.jsonl" in refused(capsys, ["replay", str(tmp_path / "nowhere.jsonl")])


def test_a_report_that_cannot_be_written_is_one_message(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--json", "--requests-jsonl", "--html", "--events", "--raw-events", "--kv-trace"):
        for path in (tmp_path / "no" / "place", tmp_path):
            assert str(path) in refused(capsys, arguments(trace, "--quiet", flag, str(path)))


def test_rejected_requests_are_reported_and_the_run_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = trace_file(tmp_path, row(), row(input_length=1024, timestamp=1))
    requests = tmp_path / "requests.jsonl"
    argv = ["replay", str(path), "--num-gpu-blocks", "10", "--requests-jsonl", str(requests)]
    assert main(argv) == 0
    assert "Rejected" in capsys.readouterr().out
    statuses = [json.loads(line) for line in requests.read_text().splitlines()]
    assert [request["status"] for request in statuses] == ["completed", "rejected"]
    assert "num_gpu_blocks=10" in statuses[1]["reason"]


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


@pytest.mark.parametrize(
    ("arguments", "new"),
    [
        (["replay", "TRACE", "--speed-up", "2"], "--arrival-rate-scale"),
        (["replay", "TRACE", "--online", "--speedup", "2"], "--clock-speed"),
        (["replay", "TRACE", "--no-leaping"], "--no-fast-forward"),
        (["events", "emit", "TRACE", "--out", "x", "--speed-up=2"], "--clock-speed"),
        (["serve", "--speedup", "2"], "--clock-speed"),
        (["fleet", "--speedup=2"], "--clock-speed"),
    ],
)
def test_a_renamed_flag_is_an_error_that_names_the_new_one(
    arguments: list[str], new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: int | str | None = main(arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert f": renamed; use {new}\n" in capsys.readouterr().err

"""Settings, files and flags that `understudy replay` refuses, each with one message."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from cli.replaying import arguments, refused
from understudy.cli import main
from workload.building import row, trace_file

if TYPE_CHECKING:
    from pathlib import Path


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
        (["--set", "engine.speedup_ratio=0"], "speedup_ratio must be finite and above 0"),
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
        (["--online", "--clock-speed", "0"], "--clock-speed must be a finite number above 0, got 0"),
        (["--online", "--clock-speed", "nan"], "--clock-speed must be a finite number above 0, got nan"),
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

"""Wrong settings and numbers are refused in one sentence, and runs that cannot fit before they take memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import understudy.memory
from replay.building import single_turns
from understudy.checks import read_settings, whole_number
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.memory import available_bytes, require_memory
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan

TRACE = Path(__file__).parents[1] / "examples" / "demo_trace.jsonl"
DEEP = "[" * 600 + "1" + "]" * 600


def test_whole_numbers_are_those_of_python_and_numpy() -> None:
    assert whole_number("n", np.int32(4), 1) == 4
    assert type(whole_number("n", np.uint64(4), 1)) is int
    for bad in (True, 1.0, "1", None):
        with pytest.raises(ConfigError, match="n must be a whole number, got"):
            whole_number("n", bad)
    with pytest.raises(ConfigError, match="n must be at least 1, got 0"):
        whole_number("n", 0, 1, 5)
    with pytest.raises(ConfigError, match="n must be at most 5, got 6"):
        whole_number("n", 6, 1, 5)


def test_a_run_takes_numpys_integers() -> None:
    config = VllmConfig(block_size=np.int64(16), num_gpu_blocks=np.int32(100))  # type: ignore[arg-type]
    run = run_offline(RunPlan(single_turns([16]), config, workers=np.int64(2), seed=np.uint8(3)))  # type: ignore[arg-type]
    assert (run.facts.workers, run.facts.seed, run.facts.engine["block_size"]) == (2, 3, 16)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "-1"], "--workers must be at least 1, got -1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--block-size", "-4"], "--block-size must be at least 1, got -4"),
        (
            ["--num-gpu-blocks", "5000000000"],
            "--num-gpu-blocks must be at most 1,073,741,824, got 5,000,000,000",
        ),
        (["--set", "load=5"], "load must be a mapping, got 5"),
        (
            ["--set", "load.kind=x"],
            "load.kind must be one of open_loop, closed_loop, lockstep, plays; got 'x'",
        ),
        (["--kv-manager", "x"], "--kv-manager must be one of kvbm, native; got 'x'"),
        (["--set", "engine.block_size=many"], "engine.block_size must be a whole number, got 'many'"),
        (["--set", "engine.timing=fast"], "engine.timing must be a mapping, got 'fast'"),
        (["--set", "engine.timing.kind=x"], "one of polynomial, constant, interpolated"),
        (["--set", "engine.timing={kind: constant, prefil_ms: 1}"], "engine.timing.prefil_ms is not known"),
        (
            ["--offload-mode", "x", "--g2", "5"],
            "--offload-mode must be one of evict, vllm, write_through; got 'x'",
        ),
        (
            ["--arrival-rate-scale", "nan"],
            "--arrival-rate-scale must be a finite number above 0, got nan; 1 leaves",
        ),
        (["--g2", "5", "--kv-bytes-per-token", "9" * 20], "--kv-bytes-per-token is too large"),
        (["--set", "engine.block_size=017"], "017 is an octal or sexagesimal number"),
        (["--set", "engine.watermark=1:30"], "1:30 is an octal or sexagesimal number"),
        (["--set", "engine.watermark=1:30.5"], "1:30.5 is an octal or sexagesimal number"),
        (["--set", f"workers={DEEP}"], "--set workers: lists or settings are nested too deeply"),
    ],
)
def test_a_refusal_says_what_is_right(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["replay", str(TRACE), *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "$" not in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nworkers: 010\n", "fleet.yaml:2: 010 is an octal"),
        (f"workers: {DEEP}\n", "fleet.yaml: lists or settings are nested too deeply"),
        ("engine:\n  block_size: 16\n  block_size: 32\n", "fleet.yaml:3: block_size is given twice"),
    ],
)
def test_a_settings_file_is_refused_by_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text(text)
    assert main(["replay", str(TRACE), "--config", str(config)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, "", "{", "[1]", "[" * 100_000, b"\xff"])
def test_a_file_that_holds_no_settings_is_named(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=r"^model .*config\.json: "):
        read_settings(path, "model ")


# ── Memory ──


def test_what_fits_is_not_refused_and_what_does_not_is_with_an_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(understudy.memory, "available_bytes", lambda: 10**10)
    require_memory("it", 8 * 10**9, "less")
    with pytest.raises(
        ConfigError, match=r"it would take about 9\.5 GB of memory, and 10\.0 GB are free; less"
    ):
        require_memory("it", 9_500_000_000, "less")
    monkeypatch.setattr(understudy.memory, "available_bytes", lambda: None)
    require_memory("it", 10**18, "less")


def test_a_small_run_is_tried_even_where_nothing_seems_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(understudy.memory, "available_bytes", lambda: 0)
    require_memory("it", 24_320, "less")
    with pytest.raises(ConfigError, match=r"it would take about 0\.1 GB of memory, and 0\.0 GB are free"):
        require_memory("it", 65_000_000, "less")


@pytest.mark.parametrize(
    ("blocks", "routing", "fits"),
    [(2048, "least_loaded", True), (1500, "least_loaded", False), (1500, "round_robin", True)],
)
def test_workers_that_meet_are_all_there_at_once(
    monkeypatch: pytest.MonkeyPatch, blocks: int, routing: str, fits: bool
) -> None:
    """An idle worker of 1,500 blocks has 93 KB; of 2,048, whose pages come as they are used, 12 KB."""
    monkeypatch.setattr(understudy.memory, "available_bytes", lambda: 10**8)
    how: dict[str, Any] = {"workers": 2000, "routing": routing}
    refused = pytest.raises(ConfigError, match=r"2,000 workers .* would take about 0\.3 GB")
    with nullcontext() if fits else refused:
        run_offline(RunPlan(single_turns([16]), VllmConfig(num_gpu_blocks=blocks), **how))


def test_files_that_a_control_group_keeps_at_hand_count_as_free(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(understudy.memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(understudy.memory, "_free_on_machine", lambda: 10**12)
    (tmp_path / "memory.max").write_text("8000000000\n")
    (tmp_path / "memory.current").write_text("7900000000\n")
    (tmp_path / "memory.stat").write_text(
        "anon 900000000\nactive_file 2000000000\ninactive_file 4900000000\nslab_reclaimable 50000000\n"
    )
    assert available_bytes() == 7_050_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes() == 10**12


def test_this_machine_knows_its_memory() -> None:
    free = available_bytes()
    assert free is None or free > 0


@pytest.mark.parametrize(
    "how",
    [
        {"workers": 10**9},
        {"engine": VllmConfig(num_gpu_blocks=2**30, eviction_policy=lambda: None), "workers": 10_000},
    ],
)
def test_a_fleet_that_cannot_fit_is_refused_before_it_is_made(how: dict[str, Any]) -> None:
    if available_bytes() is None:
        pytest.skip("this machine does not tell its memory")
    with pytest.raises(ConfigError, match=r"workers of .* blocks would take about .* GB of memory"):
        run_offline(RunPlan(single_turns([16, 16]), **how))

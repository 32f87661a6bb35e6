"""Every answer with a bill: GPUs, money and commands are those of one deployment."""

from __future__ import annotations

import json
import re
import shlex
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from answers.bill import count_commands, count_manifest
from answers.engine_commands import read_engine
from timing.test_hardware import CALIBRATED
from understudy.cli import main
from understudy.server.flags.serving import read_serve
from understudy.timing.deployment import Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.fitted_engine import FittedEngine

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.timing.timing_file import TimingFile

ROWS = [(0, 300, 4), (10, 500, 3), (20, 300, 5), (400, 800, 2)]


def trace(folder: Path) -> str:
    path = folder / "trace.jsonl"
    rows = [
        {
            "timestamp": time,
            "input_length": length,
            "output_length": out,
            "hash_ids": list(range(length // 512 + 1)),
        }
        for time, length, out in ROWS
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def written(folder: Path, file: TimingFile) -> str:
    path = folder / "mine.yaml"
    path.write_text(file.text())
    return str(path)


def fitted(blocks: int | None = None, **parallel: int) -> TimingFile:
    """A timing file of Qwen3-235B-A22B in fp8 on 8 H100."""
    engine = FittedEngine(
        version="0.33.0",
        model="Qwen3-235B-A22B",
        block_size=16,
        num_gpu_blocks=blocks or 7000,
        blocks_estimated=blocks is None,
        gpu_memory_utilization=0.92,
    )
    return msgspec.structs.replace(
        CALIBRATED,
        model=find_architecture("Qwen3-235B-A22B"),
        weights="fp8",
        parallel=Parallelism(**(parallel or {"tensor": 8})),
        engine=engine,
    )


def sweep(
    folder: Path, capsys: pytest.CaptureFixture[str], *flags: str, goal: str = "0.01"
) -> tuple[dict[str, Any], list[str]]:
    """Run a sweep; check that text, JSON and manifest of its first answer agree, and return JSON and text."""
    found, manifest = folder / "sweep.json", folder / "manifest.yaml"
    limits = ["--slo-e2e-ms", "100000", "--goal", goal, "--jobs", "1"]
    outputs = ["--json", str(found), "--manifest", str(manifest)]
    assert main(["sweep", trace(folder), "--trace-block-size", "512", *limits, *flags, *outputs]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(found.read_text())
    best = result["answers"][0]["best"]
    gpus, engines = count_commands(lines)
    assert gpus == best["gpus"] == count_manifest(manifest.read_text())
    for trial in result["trials"]:
        listed = [(each["engines"], read_engine(shlex.split(each["command"]))) for each in trial["engines"]]
        assert sum(count * one.gpus for count, one in listed) == trial["gpus"]
        assert sum(each["gpus"] for each in trial["engines"]) == trial["gpus"]
    (head,) = [line for line in lines if line.startswith("Answer")]
    assert re.search(rf": {best['gpus']:,} GPUs?\b", head), head
    assert all(engine.model for engine in engines)
    return result, lines


def audit_money(result: dict[str, Any], price: float) -> None:
    """Recompute the money of every trial from its GPUs and the tokens of the trace."""
    prompt, output = sum(row[1] for row in ROWS), sum(row[2] for row in ROWS)
    for trial in result["trials"]:
        per_hour = trial["gpus"] * price
        hours = trial["duration_s"] / 3600
        assert trial["cost_per_hour"] == pytest.approx(per_hour)
        assert trial["cost_per_month"] == pytest.approx(per_hour * 730)
        assert trial["cost_per_million_tokens"] == pytest.approx(per_hour * hours / (prompt + output) * 1e6)
        assert trial["cost_per_million_output_tokens"] == pytest.approx(per_hour * hours / output * 1e6)


def test_a_calibrated_sweep_bills_the_gpus_of_its_timing_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--timing", written(tmp_path, fitted()), "--vary", "workers=1,2", "--gpu-hour", "H100=2.5"]
    result, lines = sweep(tmp_path, capsys, *flags)
    assert result["answers"][0]["best"]["gpus"] == 8
    assert any("8 GPUs ($20.00/h)" in line for line in lines)
    audit_money(result, 2.5)
    _, (engine,) = count_commands(lines)
    assert (engine.model, engine.given["tp"]) == ("Qwen/Qwen3-235B-A22B", 8)


def test_a_file_of_ranks_bills_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = fitted(tensor=1, data=8, expert=8)
    flags = ["--timing", written(tmp_path, file), "--vary", "workers=1,2", "--gpu-hour", "2"]
    result, lines = sweep(tmp_path, capsys, *flags)
    assert [trial["gpus"] for trial in result["trials"]] == [8, 16]
    _, (engine,) = count_commands(lines)
    assert (engine.given["dp"], engine.given["whole experts"]) == (8, True)


def test_stages_of_a_pipeline_are_billed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = [
        "--model",
        "Llama-3.1-70B",
        "--gpu",
        "H100",
        "--weight-dtype",
        "fp8",
        "--tensor-parallel-size",
        "2",
    ]
    sizes = ["--vary", "pipeline-parallel-size=1,2,3", "--gpu-hour", "H100=2.5"]
    result, lines = sweep(tmp_path, capsys, *fleet, *sizes)
    assert sorted(trial["gpus"] for trial in result["trials"]) == [2, 4, 6]
    audit_money(result, 2.5)
    stages = {
        trial["gpus"]: read_engine(shlex.split(each["command"])).given.get("pp", 1)
        for trial in result["trials"]
        for each in trial["engines"]
    }
    assert stages == {2: 1, 4: 2, 6: 3}
    assert any("never measured" in line for line in lines)


def test_an_older_file_bills_its_gpus_and_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = msgspec.structs.replace(fitted(), engine=None)
    assert "engine:" not in old.text()
    result, lines = sweep(
        tmp_path,
        capsys,
        "--timing",
        written(tmp_path, old),
        "--vary",
        "workers=1,2",
        "--gpu-hour",
        "H100=2.5",
    )
    assert result["answers"][0]["best"]["cost_per_hour"] == 20
    assert any("older one without block size, KV blocks" in line for line in lines)


@pytest.mark.parametrize("blocks", [14741, None])
def test_a_replay_has_the_blocks_of_its_timing_file(
    blocks: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--timing", written(tmp_path, fitted(blocks))]
    gpu = [
        "--model",
        "Qwen3-235B-A22B",
        "--gpu",
        "H100",
        "--tensor-parallel-size",
        "8",
        "--weight-dtype",
        "fp8",
    ]
    counted = []
    for flags in (own, [*gpu, "--block-size", "16"]):
        path = tmp_path / "report.json"
        words = ["replay", trace(tmp_path), "--trace-block-size", "512", *flags, "--no-advice", "--quiet"]
        assert main([*words, "--json", str(path)]) == 0
        counted.append(json.loads(path.read_text())["run"]["engine"])
    assert counted[0]["block_size"] == 16
    assert counted[0]["num_gpu_blocks"] == (blocks or counted[1]["num_gpu_blocks"])
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--tensor-parallel-size", "4"], "--tensor-parallel-size is 4"),
        (["--gpu", "H200"], "gpu is H200"),
        (["--data-parallel-size", "2"], "--data-parallel-size is 2"),
        (["--model", "Llama-3.1-8B", "--tensor-parallel-size", "8"], "model is Llama-3.1-8B"),
        (["--engine", "sglang"], "fitted to vllm, but here the engine is sglang"),
    ],
)
def test_flags_that_contradict_the_file_are_refused(
    flags: list[str], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = ["--timing", written(tmp_path, fitted(14741))]
    assert main(["replay", trace(tmp_path), "--trace-block-size", "512", *timing, *flags]) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert "give" in told


@pytest.mark.parametrize(
    ("flags", "sizes"),
    [
        (["--vary", "workers=1,2", "engine.data_parallel_size=1,2"], {1, 2, 4}),
        (["--vary", "workers=1,2", "data-parallel-size=1,2"], {1, 2, 4}),
        (
            ["--vary", "workers=1,2", "--set", "engine.data_parallel_size=2", "--tensor-parallel-size", "4"],
            {8, 16},
        ),
        (["--vary", "workers=2", "--data-parallel-size", "8"], {16}),
        (["--vary", "workers=2", "--engine", "sglang", "--data-parallel-size", "2"], {4}),
        (["--vary", "routing=kv", "--data-parallel-size", "2"], {2}),
        (["--splits", "4", "--tensor-parallel-size", "2"], {4}),
        (["--vary", "tensor-parallel-size=1,2", "workers=1", "weight-dtype=bf16,fp8"], {1, 2}),
    ],
)
def test_gpus_count_however_they_are_asked_for(
    flags: list[str], sizes: set[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = ["--model", "Llama-3.1-8B", "--gpu", "H100", "--gpu-hour", "H100=2.5"]
    result, _ = sweep(tmp_path, capsys, *deployment, *flags)
    assert {trial["gpus"] for trial in result["trials"]} == sizes
    audit_money(result, 2.5)


def test_ranks_in_a_settings_file_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text(
        "workers: 2\nmodel: Qwen3-30B-A3B\ngpu: {name: H100, tensor_parallel_size: 2}\n"
        "engine: {data_parallel_size: 4}\n"
    )
    result, lines = sweep(tmp_path, capsys, "--config", str(config), "--vary", "max-num-seqs=64")
    assert [trial["gpus"] for trial in result["trials"]] == [16]
    assert "Commands of the answer (2 x engine of 4 ranks):" in lines


def test_pools_count_and_ranks_in_them_are_refused_before_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text("pools:\n- {name: a, workers: 2, engine: {}}\n- {name: b, workers: 3, engine: {}}\n")
    result, lines = sweep(tmp_path, capsys, "--config", str(config), "--vary", "routing=least_loaded")
    assert [trial["gpus"] for trial in result["trials"]] == [5]
    assert any("no GPU is named: each worker counts as one GPU" in line for line in lines)
    config.write_text(config.read_text().replace("{}", "{data_parallel_size: 2}"))
    words = [
        "sweep",
        trace(tmp_path),
        "--trace-block-size",
        "512",
        "--slo-e2e-ms",
        "1",
        "--config",
        str(config),
    ]
    assert main([*words, "--vary", "routing=least_loaded"]) == 2
    assert "data_parallel_size" in capsys.readouterr().err


def test_ranks_of_prefill_and_decode_workers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--model",
        "Llama-3.1-8B",
        "--gpu",
        "H100",
        "--data-parallel-size",
        "2",
        "--prefill-workers",
        "1",
    ]
    words = ["sweep", trace(tmp_path), "--trace-block-size", "512", "--slo-e2e-ms", "1", *flags]
    assert main([*words, "--vary", "decode-workers=1,2"]) == 2
    assert "data-parallel-size" in capsys.readouterr().err.replace("_", "-")


def test_what_no_command_can_say_is_refused_before_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "Qwen3-30B-A3B", "--gpu", "H100", "--tensor-parallel-size", "4"]
    words = ["sweep", trace(tmp_path), "--trace-block-size", "512", "--slo-e2e-ms", "1", *flags]
    assert main([*words, "--vary", "expert-parallel-size=2"]) == 2
    assert "vLLM has one group of experts, or one per GPU" in capsys.readouterr().err


def test_a_gpu_that_was_never_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "Llama-3.1-8B", "--gpu", "GB200"]
    said = "GB200 was never measured"
    result, _ = sweep(tmp_path, capsys, *flags, "--vary", "workers=1", "--gpu-hour", "GB200=4")
    assert any(said in source for source in result["times"])
    for verb in (
        ["replay", trace(tmp_path), "--trace-block-size", "512", "--no-advice"],
        ["predict", "--isl", "100", "--osl", "10", "--concurrency", "2"],
        ["capacity", "--max-model-len", "8192"],
    ):
        assert main([*verb, *flags]) == 0
        captured = capsys.readouterr()
        assert said in " ".join(f"{captured.out} {captured.err}".split()), verb[0]


def test_servers_take_blocks_and_ranks_from_the_file(tmp_path: Path) -> None:
    timing = ["--timing", written(tmp_path, fitted(9000, tensor=1, data=8, expert=8))]
    found = read_serve(timing).settings
    assert (found.engine.num_gpu_blocks, found.engine.block_size, found.data_parallel_size) == (9000, 16, 8)
    assert read_serve([*timing, "--num-gpu-blocks", "50"]).settings.engine.num_gpu_blocks == 50

"""Flags of `predict` and `calibrate check` that would change nothing are refused, and say where it is told instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from calibrate.rows import SMALL_ROW, table
from calibrate.test_predict_recorded import run_file
from timing.test_hardware import CALIBRATED
from understudy.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-num-seqs", "3"], "fill the column max_num_seqs for --max-num-seqs"),
        (["--max-num-seqs", "128"], "--max-num-seqs is for"),  # what it is by default is said all the same
        (["--max-num-batched-tokens", "8"], "fill the column max_num_batched_tokens"),
        (["--max-model-len", "4"], "fill the column max_model_len"),
        (["--num-gpu-blocks", "3"], "leave out --num-gpu-blocks, for which a table has no column"),
        (["--vllm-version", "0.19"], "fill the column backend_version"),
        (["--no-enable-prefix-caching"], "leave out --no-enable-prefix-caching"),
        (["--enable-prefix-caching"], "leave out --enable-prefix-caching"),
        (["--tensor-parallel-size", "8"], "fill the column tp_size (or tp)"),
        (["--data-parallel-size", "2"], "leave out --data-parallel-size"),
        (["--weight-dtype", "int4"], "fill the column quant (or dtype)"),
        (["--kv-dtype", "fp8"], "fill the column kv_cache_dtype"),
        (
            ["--gpu-memory", "80GiB", "--gpu-weights", "5GB"],
            "--gpu-memory, --gpu-weights are for a recorded run",
        ),
        (["--gpu-memory-utilization", "0.5"], "leave out --gpu-memory-utilization"),
        (["--extrapolate"], "leave out --extrapolate"),
        (["--model", "Llama-3.1-8B", "--timing", "physical"], "for --model; leave out --timing"),
        (["--gpu", "H100"], "fill the column system (or hardware) for --gpu"),
    ],
)
def test_a_table_refuses_flags_that_it_would_not_heed(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = table(tmp_path / "in.csv", SMALL_ROW)
    assert main(["predict", str(source), *flags, "-o", str(tmp_path / "out.csv")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-parallel-size", "4"],
        ["--weight-dtype", "fp8"],
        ["--kv-dtype", "fp8"],
        ["--gpu-memory", "40GiB"],
        ["--model", "Llama-3.1-8B"],
    ],
)
@pytest.mark.parametrize("verb", [["predict"], ["calibrate", "check"]])
def test_flags_beside_a_timing_file_that_says_it_are_refused(
    verb: list[str], flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timing = tmp_path / "timing.yaml"
    timing.write_text(CALIBRATED.text())
    if verb == ["predict"]:
        row = {"request_id": "a", "arrival_s": 0, "input_tokens": 9, "output_tokens": 3}
    else:
        row = {"arrival_ms": 0, "prompt_tokens": 9, "output_tokens": 3, "ttft_ms": 9, "e2e_ms": 30}
    source = run_file(tmp_path / "run.jsonl", [row])
    assert main([*verb, str(source), "--timing", str(timing)]) == 0
    capsys.readouterr()
    assert main([*verb, str(source), "--timing", str(timing), *flags]) == 2
    assert f"--timing already names the model and its GPUs; leave out {flags[0]} " in capsys.readouterr().err

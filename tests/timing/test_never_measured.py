"""GPUs that are known by their data sheets alone: every output says that they were never measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from understudy.cli import main
from understudy.run.settings import ReplaySettings
from understudy.timing.deployment import Deployment
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import GPUS, find_gpu
from understudy.timing.presets import preset

if TYPE_CHECKING:
    from pathlib import Path

MEASURED = ("H100", "H200", "B200", "A100", "L40S", "RTX 4090", "RTX PRO 6000")

SHEETS = {
    # name in a table: memory GB/s, bf16 and fp8 TFLOP/s (dense), GB/s to other GPUs in one direction, GB as sold
    "b300_sxm": ("B300", 8000, 2250, 4500, 900, 288),
    "gb200": ("GB200", 8000, 2500, 5000, 900, 186),
    "GB300 NVL72": ("GB300", 8000, 2500, 5000, 900, 288),
    "h20_sxm": ("H20", 4000, 148, 296, 450, 96),
    "NVIDIA GH200 480GB": ("GH200", 4000, 989, 1979, 450, 96),
    "GeForce RTX 5090": ("RTX 5090", 1792, 209.5, 419, 64, 32),
    "L4": ("L4", 300, 121, 242, 32, 24),
    "A10G": ("A10G", 600, 70, None, 32, 24),
    "AMD Instinct MI300X": ("MI300X", 5300, 1307, 2615, 448, 192),
    "MI325X": ("MI325X", 6000, 1307, 2615, 448, 256),
    "mi355x": ("MI355X", 8000, 2517, 5033, 537.6, 288),
}


@pytest.mark.parametrize("given", SHEETS)
def test_a_data_sheet_is_found_by_its_names(given: str) -> None:
    name, bandwidth, bf16, fp8, link, sold = SHEETS[given]
    found = find_gpu(given)
    assert (found.name, found.bandwidth_gbps, found.bf16_tflops, found.fp8_tflops) == (
        name,
        bandwidth,
        bf16,
        fp8,
    )
    assert found.link_gbps == link
    assert found.memory_gb == pytest.approx(sold, rel=0.075)  # GB or GiB, less what the driver keeps


def test_all_others_were_measured() -> None:
    assert {gpu.name for gpu in GPUS.values() if not gpu.like} == set(MEASURED)
    assert {gpu.name for gpu in GPUS.values() if gpu.like} == {sheet[0] for sheet in SHEETS.values()}
    assert all(gpu.like in ("", *MEASURED) for gpu in GPUS.values())


@pytest.mark.parametrize("gpu", [gpu.name for gpu in GPUS.values() if gpu.like])
@pytest.mark.parametrize("model", ["Llama-3.1-8B", "Qwen3-30B-A3B", "DeepSeek-R1"])
def test_times_say_that_the_gpu_was_never_measured(gpu: str, model: str) -> None:
    found = preset(find_architecture(model), find_gpu(gpu), "bf16", "bf16")
    assert found.trust == "uncalibrated"
    assert found.origin.startswith(f"{gpu} was never measured: ")
    assert f"with the efficiencies of {find_gpu(gpu).like} (" in found.origin


def test_a_data_sheet_is_used_with_the_efficiencies_of_the_gpu_that_it_resembles() -> None:
    model = find_architecture("Llama-3.1-70B")
    found = [
        Deployment(model=model, gpu=find_gpu(gpu), weights="fp8").coefficients(
            preset(model, find_gpu(gpu), "fp8", "bf16").efficiencies
        )
        for gpu in ("H200", "H20")
    ]
    assert found[1].weights_ms == pytest.approx(found[0].weights_ms * 4800 / 4000)
    assert found[1].token_ms == pytest.approx(found[0].token_ms * 1979 / 296)


def test_reports_pages_predictions_sweeps_and_capacity_say_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page = tmp_path / "trace.jsonl", tmp_path / "page.html"
    rows = [{"timestamp": 0, "input_length": 500, "output_length": 4, "hash_ids": [i]} for i in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", "Llama-3.1-8B", "--gpu", "MI300X"]
    said = "MI300X was never measured"
    for words in (
        ["replay", str(trace), "--html", str(page)],
        ["predict", "--isl", "100", "--osl", "10", "--concurrency", "2"],
        ["sweep", str(trace), "--slo-e2e-ms", "1e6", "--vary", "workers=1"],
        ["capacity", "--max-model-len", "8192"],
    ):
        assert main([*words, *flags]) == 0
        captured = capsys.readouterr()
        assert said in " ".join(f"{captured.out} {captured.err}".split()), words[0]
    assert said in page.read_text()


def test_a_server_says_it() -> None:
    found = ReplaySettings.read(None, {}, ["model=Llama-3.1-8B", "gpu.name=B300"])
    assert "B300 was never measured" in found.engine.timing.describe_origin()

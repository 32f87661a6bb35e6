"""A timing file is of one deployment: beside flags that describe another one it is refused, and says what differs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from timing.test_hardware import CALIBRATED
from understudy.cli import main
from understudy.cli.fleet import read_fleet
from understudy.errors import ConfigError
from understudy.server.flags.serving import read_serve
from understudy.timing.deployment import Parallelism
from understudy.timing.gpus import sheet_gpu
from understudy.timing.physical import Physical

if TYPE_CHECKING:
    from understudy.timing.timing_file import TimingFile

DEMO = Path(__file__).parents[2] / "examples" / "demo_trace.jsonl"
OWN = ["--model", "Llama-3.1-8B", "--gpu", "H100"]
SHEET = ["--gpu-bandwidth-gbps", "960", "--gpu-tflops", "209", "--gpu-memory", "48GiB"]
OTHERS = {
    "model": (["--model", "Llama-3.1-70B"], "model is Llama-3.1-70B"),
    "gpu": (["--model", "Llama-3.1-8B", "--gpu", "H200"], "gpu is H200"),
    "data sheet": (["--model", "Llama-3.1-8B", *SHEET], "gpu is data sheet"),
    "size": ([*OWN, "--tensor-parallel-size", "2"], "tensor_parallel_size is 2"),
    "weights": ([*OWN, "--weight-dtype", "fp8"], "weight_dtype is fp8"),
    "blocks alone": (
        ["--model", "Qwen3-8B", "--gpu-memory", "80GiB", "--gpu-weights", "16GB"],
        "model is Qwen3-8B",
    ),
    "two things": (
        ["--model", "Llama-3.1-70B", "--gpu", "H100", "--tensor-parallel-size", "4"],
        "model is Llama-3.1-70B and tensor_parallel_size is 4",
    ),
}
"""Flags that describe another deployment than CALIBRATED, and what of it is named."""


def written(path: Path, file: TimingFile = CALIBRATED) -> str:
    path.write_text(file.text())
    return str(path)


@pytest.mark.parametrize("other", OTHERS)
def test_a_timing_file_of_another_deployment_is_refused(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, words = OTHERS[other]
    timing = ["--timing", written(tmp_path / "timing.yaml")]
    assert main(["replay", str(DEMO), *timing, *flags, "--quiet"]) == 2
    told = capsys.readouterr().err
    typed = re.sub(r"(\w+)_(parallel_size|dtype)", lambda name: "--" + name[0].replace("_", "-"), words)
    assert f"--timing was fitted to Llama-3.1-8B in bf16 (KV bf16) on 1 × H100, but here {typed};" in told
    if other != "blocks alone":  # a server's blocks do not come from its memory alone
        for read in (read_serve, read_fleet):
            with pytest.raises(ConfigError, match=f"but here {words};"):
                read([*flags, *timing])


def test_the_type_of_the_kv_cache_is_part_of_it(tmp_path: Path) -> None:
    timing = ["--timing", written(tmp_path / "timing.yaml")]
    with pytest.raises(ConfigError, match="kv_dtype is fp8"):
        read_serve([*OWN, *timing, "--kv-cache-dtype", "fp8"])
    with pytest.raises(ConfigError, match="kv_dtype is fp8"):
        read_serve(["my-model", *timing, "--kv-cache-dtype", "fp8_e4m3"])


def test_a_size_that_is_said_without_a_gpu_is_compared(tmp_path: Path) -> None:
    two = msgspec.structs.replace(CALIBRATED, parallel=Parallelism(tensor=2))
    timing = ["--timing", written(tmp_path / "timing.yaml", two)]
    read_serve(["my-model", *timing, "--tensor-parallel-size", "2"])
    with pytest.raises(ConfigError, match=r"on 2 × H100, but here tensor_parallel_size is 4;"):
        read_serve(["my-model", *timing, "--tensor-parallel-size", "4"])


def test_settings_in_a_file_are_compared_as_flags_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "fleet.yaml"
    config.write_text("model: Llama-3.1-8B\ngpu: {name: A100}\n")
    timing = written(tmp_path / "timing.yaml")
    assert main(["replay", str(DEMO), "--config", str(config), "--timing", timing, "--quiet"]) == 2
    assert "gpu is A100" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        [],
        OWN,
        ["--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "NVIDIA H100 80GB HBM3"],
        [*OWN, "--data-parallel-size", "2"],  # a dense model's ranks have nothing in common
    ],
)
def test_the_deployment_that_was_fitted_is_taken_under_any_name_of_it(
    flags: list[str], tmp_path: Path
) -> None:
    timing = written(tmp_path / "timing.yaml")
    assert main(["replay", str(DEMO), "--timing", timing, *flags, "--block-size", "16", "--quiet"]) == 0
    found = read_serve([*flags, "--timing", timing]).settings.engine.timing
    assert isinstance(found, Physical)
    assert found.coefficients == CALIBRATED.timing().coefficients


def test_a_model_that_nobody_knows_is_served_with_any_timing_file(tmp_path: Path) -> None:
    timing = ["--timing", written(tmp_path / "timing.yaml")]
    for named in (["acme/our-own"], ["Llama-3.1-8B"], []):
        read_serve([*named, *timing])


def test_gpus_by_data_sheet_are_compared_by_their_numbers(tmp_path: Path) -> None:
    own = msgspec.structs.replace(
        CALIBRATED, gpu=sheet_gpu(bandwidth_gbps=960, tflops=209, memory_gb=48 * 1.073741824)
    )
    timing = ["--timing", written(tmp_path / "timing.yaml", own), "Llama-3.1-8B"]
    read_serve([*timing, *SHEET])
    with pytest.raises(ConfigError, match="but here gpu is data sheet"):
        read_serve([*timing, *SHEET[:1], "961", *SHEET[2:]])

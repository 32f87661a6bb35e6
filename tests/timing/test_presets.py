"""Presets: whole steps as computed by hand, and whole reports as they were once written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from timing.test_hardware import CALIBRATED
from understudy._core import StepLoad
from understudy.cli import main
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import find_gpu
from understudy.timing.presets import preset
from understudy.timing.timing_file import TimingFile

GOLDEN = Path(__file__).parents[1] / "golden" / "timing"
LLAMA = "Llama-3.1-70B"


@pytest.mark.parametrize(
    ("model", "gpu", "kind", "tensor", "decodes", "chunks", "ms"),
    [
        # Weights of 17.1 GB at 80.5 % of 3.35 TB/s, and the head; KV of 64,000 tokens at 41 KB; 160 sums among four
        # GPUs of 13.7 µs · 1.3 and 32 tokens; 0.95 + 80 · 0.0065 + 32 · 0.011 ms of overhead.
        (LLAMA, "H100", "fp8", 4, (32, 2000), [], 14.1257),
        (LLAMA, "H200", "fp8", 8, (16, 1500), [(4096, 0), (1000, 3000)], 182.4641),
        (LLAMA, "B200", "fp8", 8, (4, 900), [(922, 0)], 85.6),  # the launch floor: 80 layers of 1.07 ms
        (LLAMA, "B200", "fp8", 1, (64, 1500), [], 19.5608),
        ("Llama-3.1-8B", "A100", "bf16", 1, (20, 700), [(575, 0)], 57.0591),
        ("Llama-3.1-8B", "L40S", "bf16", 1, (20, 700), [], 27.5832),
    ],
)
def test_a_preset_gives_the_step_that_was_computed_by_hand(
    model: str,
    gpu: str,
    kind: str,
    tensor: int,
    decodes: tuple[int, int],
    chunks: list[tuple[int, int]],
    ms: float,
) -> None:
    shape = find_architecture(model)
    parallel = Parallelism(tensor=tensor)
    deployed = Deployment(model=shape, gpu=find_gpu(gpu), weights=kind, kv=kind, parallel=parallel)
    reached = preset(shape, deployed.gpu, kind, kind).efficiencies
    step = StepLoad(chunks=chunks, decodes=decodes[0], context_tokens=decodes[0] * decodes[1])
    assert deployed.coefficients(reached).build().step_ms(step) == pytest.approx(ms, rel=1e-5)


@pytest.mark.parametrize("name", ["preset", "calibrated"])
def test_a_report_is_the_one_that_was_written_down(name: str, tmp_path: Path) -> None:
    assert played(name, tmp_path) == json.loads((GOLDEN / f"{name}.json").read_text())


def played(name: str, folder: Path) -> dict[str, Any]:
    """What a report says of a small trace, without what depends on the machine."""
    trace, report = folder / "trace.jsonl", folder / "report.json"
    rows = [
        {
            "timestamp": 40 * i,
            "input_length": 520 + 40 * i,
            "output_length": 6 + i % 5,
            "hash_ids": [i // 2, 100 + i],
        }
        for i in range(12)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", "Llama-3.1-8B", "--gpu", "H100"]
    if name == "calibrated":
        flags = ["--timing", str(GOLDEN / "timing.yaml"), "--num-gpu-blocks", "4096"]
    assert main(["replay", str(trace), *flags, "--block-size", "16", "--json", str(report), "--quiet"]) == 0
    said = json.loads(report.read_text())
    names = ("requests", "ttft_ms", "tpot_ms", "e2e_ms", "queue_ms", "duration_s")
    return {**{key: _rounded(said[key]) for key in names}, "times": _rounded(said["run"]["times"])}


def test_a_timing_file_is_the_one_that_was_written_down() -> None:
    path = GOLDEN / "timing.yaml"
    assert TimingFile.read(path) == CALIBRATED
    assert path.read_text() == CALIBRATED.text()


def _rounded(value: Any) -> Any:
    """Sums of fractions may end otherwise on another machine."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return round(value, 5) if isinstance(value, float) else value

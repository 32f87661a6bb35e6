"""A model on GPUs, as flags and files name them: step times, blocks, and what a report says of both."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from replay.building import MS, conversations, single_turns
from understudy.api import replay
from understudy.cli import main
from understudy.engines.vllm_config import VllmConfig
from understudy.errors import ConfigError
from understudy.run.offline import run_offline
from understudy.run.run_plan import RunPlan
from understudy.run.settings import ReplaySettings
from understudy.server.flags.ours import all_flags
from understudy.server.flags.serving import read_serve
from understudy.tiers.gpu import GpuSettings
from understudy.timing.coefficients import StepCoefficients
from understudy.timing.deployment import Parallelism
from understudy.timing.efficiencies import Efficiencies
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpu_flags import GPU_FLAGS
from understudy.timing.gpus import find_gpu
from understudy.timing.physical import Domain, Physical, Residuals
from understudy.timing.sources import MeasuredKernels
from understudy.timing.timing_file import TimingFile

if TYPE_CHECKING:
    from pathlib import Path

CALIBRATED = TimingFile(
    date="2026-01-01",
    understudy="0.1.0",
    model=find_architecture("Llama-3.1-8B"),
    gpu=find_gpu("H100"),
    weights="bf16",
    kv="bf16",
    parallel=Parallelism(),
    efficiencies=Efficiencies(weights=0.8, compute=0.5, kv=0.8, front_end_ms=5.0),
    fitted=(),
    inputs=(),
    residuals=Residuals(ttft_percent=4.8, tpot_percent=2.34, measurements=3),
    domain=Domain(requests=2),
)


def settings(*assignments: str) -> ReplaySettings:
    return ReplaySettings.read(None, {}, list(assignments))


def tpot_ms(model: str, gpu: str, tp: int) -> float:
    found = settings(f"model={model}", f"gpu.name={gpu}", f"gpu.tensor_parallel_size={tp}")
    report = replay(single_turns([1000] * 8, 100), found.engine)
    return float(report.tpot_ms.mean)


def test_larger_models_and_slower_gpus_take_longer() -> None:
    small, large = tpot_ms("Llama-3.1-8B", "H100", 1), tpot_ms("Llama-3.1-405B", "B200", 8)
    assert small < tpot_ms("Llama-3.1-70B", "H100", 4) < large
    assert small < tpot_ms("Llama-3.1-8B", "A100", 1) < tpot_ms("Llama-3.1-8B", "L40S", 1)


def test_blocks_follow_from_the_memory_and_say_how_far_they_may_be_off() -> None:
    gpu = (
        "model=Llama-3.1-8B",
        "gpu.name=RTX 4090",
        "engine.block_size=16",
        "engine.max_num_batched_tokens=2048",
        "engine.vllm_version=0.19.0",
    )
    found = settings(*gpu)
    # A recorded run of that release on this GPU has 2,588 blocks, one of them reserved.
    assert found.engine.num_gpu_blocks == pytest.approx(2587, rel=0.05)
    assert "estimated" in found.notes[0]
    told = settings(*gpu, "engine.num_gpu_blocks=2587")
    assert told.engine.num_gpu_blocks == 2587
    assert told.notes == ()
    assert told.engine.timing == found.engine.timing


def test_a_sliding_window_takes_room_once_a_sequence() -> None:
    gpu = GpuSettings(name="H100", tensor_parallel_size=2)
    wide = gpu.num_blocks("gpt-oss-120b", None, 16, sequences=256)
    narrow = gpu.num_blocks("gpt-oss-120b", None, 16, sequences=8)
    assert wide.blocks < narrow.blocks


def test_a_gpu_by_its_data_sheet_says_so() -> None:
    sheet = GpuSettings(bandwidth_gbps=960, tflops=209, memory="48GiB")
    said = sheet.timing("Llama-3.1-8B", None).describe_origin()
    assert said.startswith("data sheet: ")
    assert "uncalibrated" in said


@pytest.mark.parametrize(
    ("gpu", "says"),
    [
        ({"name": "H100", "tflops": 100.0, "bandwidth_gbps": 100.0}, "both define the GPU"),
        ({"bandwidth_gbps": 100.0}, "need each other"),
        ({"bandwidth_gbps": 100.0, "tflops": 1.0}, "needs gpu.memory"),
        ({"memory": "80GiB"}, "memory and weights"),
    ],
)
def test_gpus_that_are_half_said_are_refused(gpu: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        GpuSettings(**gpu)


def test_a_model_that_does_not_fit_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="which leaves no room for KV blocks; use more GPUs"):
        settings("model=Llama-3.1-405B", "gpu.name=H100")


def test_every_report_says_where_its_times_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, timing, page = tmp_path / "trace.jsonl", tmp_path / "timing.yaml", tmp_path / "page.html"
    rows = [{"timestamp": 0, "input_length": 500, "output_length": 20, "hash_ids": [i]} for i in range(4)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    timing.write_text(CALIBRATED.text())

    def run(*flags: str) -> tuple[str, dict[str, Any]]:
        report = tmp_path / "report.json"
        assert main(["replay", str(trace), "--json", str(report), "--html", str(page), *flags]) == 0
        said = capsys.readouterr().out.replace("\n", " ")
        return " ".join(said.split()), json.loads(report.read_text())["run"]["times"]

    said, times = run()
    assert "Times from a generic polynomial" in said
    assert (times["outside_domain_share"], times["front_end_ms"]) == (0, 0)
    preset_ms = GpuSettings(name="H100").timing("Llama-3.1-8B", None).front_end_ms
    said, times = run("--gpu", "H100", "--model", "Llama-3.1-8B")
    assert "Times from preset: Llama-3.1-8B in bf16 (KV bf16) on H100, fitted" in said
    assert f"include {preset_ms:g} ms between client and engine" in said
    said, times = run("--timing", str(timing))
    assert "off by TTFT 4.8 %, TPOT 2.3 % (median of 3)" in said
    assert times["outside_domain_share"] == 1
    assert "100.0% of the time in steps outside" in said
    assert "calibrated: Llama-3.1-8B in bf16 on 1 × H100" in page.read_text()
    said, times = run("--gpu", "H100", "--model", "Llama-3.1-8B", "--timing", "polynomial")
    assert "generic polynomial" in said


def test_time_between_client_and_engine_is_in_ttft_and_between_turns() -> None:
    numbers = StepCoefficients(step_ms=2.0)
    engine = VllmConfig(async_scheduling=False, timing=Physical(coefficients=numbers, front_end_ms=5.0))
    bare = VllmConfig(async_scheduling=False, timing=Physical(coefficients=numbers))
    inside, seen = (run_offline(RunPlan(conversations(1), how)).timeline for how in (bare, engine))
    assert (
        (seen.first_token_ns - seen.arrival_ns) - (inside.first_token_ns - inside.arrival_ns) == 5 * MS
    ).all()
    assert (seen.last_token_ns - seen.first_token_ns == inside.last_token_ns - inside.first_token_ns).all()
    follows = inside.arrival_ns > inside.arrival_ns.min()
    assert (seen.arrival_ns[follows] > inside.arrival_ns[follows]).all()


def test_a_server_takes_the_same_flags() -> None:
    plan = read_serve(
        ["Llama-3.1-8B", "--gpu", "H100", "--tensor-parallel-size", "2", "--kv-cache-dtype", "fp8"]
    )
    engine = plan.settings.engine
    assert engine.timing == GpuSettings(name="H100", tensor_parallel_size=2).timing("Llama-3.1-8B", "fp8")
    assert engine.num_gpu_blocks > 50_000
    assert plan.idle == []
    assert plan.settings.describe_times().startswith("preset: Llama-3.1-8B in bf16 (KV fp8) on 2 x H100")
    constants = read_serve(["m", "--time-to-first-token", "20", "--inter-token-latency", "5"]).settings
    assert constants.describe_times() == "given constants: 20 ms of prefill, 5 ms of decode"
    with pytest.raises(ConfigError, match="--gpu-tflops needs --gpu"):
        read_serve(["m", "--gpu-tflops", "100"])


def test_a_server_takes_op_tables_and_ranks_and_says_what_means_nothing_to_it(tmp_path: Path) -> None:
    on_gpu = ["Llama-3.1-8B", "--gpu", "RTX-4090"]
    plan = read_serve([*on_gpu, "--timing", str(tmp_path), "--extrapolate", "--front-end-ms", "3"])
    timing = plan.settings.engine.timing
    assert isinstance(timing, MeasuredKernels)
    assert (timing.folder, timing.extrapolate) == (str(tmp_path), True)
    assert plan.idle == ["front-end-ms"]
    with pytest.raises(ConfigError, match="--extrapolate is for op tables"):
        read_serve([*on_gpu, "--extrapolate"])
    ranks = ["Qwen3-30B-A3B", "--gpu", "H200", "--tensor-parallel-size", "4"]
    dealt = [
        read_serve([*ranks, *flags]).settings.engine.timing
        for flags in (["--expert-parallel-size", "4"], ["--enable-expert-parallel"], [])
    ]
    assert dealt[0] == dealt[1] != dealt[2]
    with pytest.raises(ConfigError, match=r"makes 4 expert-parallel groups.*give one"):
        read_serve([*ranks, "--enable-expert-parallel", "--expert-parallel-size", "2"])


def test_every_verb_has_the_same_names_of_these_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, without in (
        ("replay", ()),
        ("predict", ("front-end-ms",)),
        (
            "calibrate",
            ("gpu-weights", "front-end-ms", "extrapolate", "pipeline-parallel-size", "stage-link-gbps"),
        ),
    ):
        with pytest.raises(SystemExit):
            main([verb, "--help-all" if verb == "replay" else "--help"])
        said = capsys.readouterr().out
        for name in GPU_FLAGS:
            assert (f"--{name} " in said or f"--{name}\n" in said) == (name not in without), (verb, name)
    assert {f"--{name}" for name in GPU_FLAGS} <= all_flags().keys()


def test_ranks_that_share_experts_are_workers_that_step_together() -> None:
    gpu = (
        "model=Qwen3-30B-A3B",
        "gpu.name=RTX PRO 6000",
        "gpu.data_parallel_size=2",
        "gpu.expert_parallel_size=2",
    )
    found = settings(*gpu)
    assert (found.workers, found.engine.data_parallel_size, found.ranks) == (1, 2, True)
    dense = ("model=Llama-3.1-8B", "gpu.name=H100", "gpu.data_parallel_size=2")
    found = settings(*dense)
    assert (found.workers, found.engine.data_parallel_size, found.ranks) == (1, 2, False)
    assert settings(*gpu, "workers=3").workers == 3  # engines, each of two ranks
    with pytest.raises(
        ConfigError, match=r"engine\.data_parallel_size=4 contradicts gpu\.data_parallel_size=2"
    ):
        settings(*gpu, "engine.data_parallel_size=4")

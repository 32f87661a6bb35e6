"""What is said beside a GPU's name replaces what its data sheet has, or is refused where it would change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from timing.test_hardware import CALIBRATED
from understudy.cli import main
from understudy.errors import ConfigError
from understudy.run.settings import ReplaySettings
from understudy.server.flags.serving import read_serve
from understudy.tiers.gpu import GpuSettings
from understudy.timing.physical import Physical
from understudy.timing.timing_file import TimingFile

if TYPE_CHECKING:
    from pathlib import Path

H100 = ("model=Llama-3.1-8B", "gpu.name=H100")


def comm_token_ms(**gpu: Any) -> float:
    timing = GpuSettings(name="H100", tensor_parallel_size=2, **gpu).timing("Llama-3.1-8B", None)
    assert isinstance(timing, Physical)
    return timing.coefficients.comm_token_ms


def test_a_link_replaces_the_one_that_a_gpu_has_by_its_name() -> None:
    assert comm_token_ms(link_gbps=45.0) == pytest.approx(10 * comm_token_ms())  # 450 on the data sheet
    said = GpuSettings(name="H100", tensor_parallel_size=2, link_gbps=45.0).timing("Llama-3.1-8B", None)
    assert "on 2 x H100 (links of 45 GB/s), " in said.describe_origin()
    with pytest.raises(ConfigError, match=r"gpu\.link_gbps must be a finite number above 0, got 0"):
        comm_token_ms(link_gbps=0.0)


def test_calibrate_fits_on_a_gpu_of_the_memory_that_was_given(tmp_path: Path) -> None:
    bench = tmp_path / "bench.csv"
    bench.write_text("isl,osl,conc,mean_ttft_ms,mean_tpot_ms\n500,20,4,60,9\n")
    out = tmp_path / "timing.yaml"
    fit = ["calibrate", str(bench), "--model", "Llama-3.1-8B", "--gpu", "H100", "-o", str(out)]
    assert main([*fit, "--gpu-memory", "40GB", "--gpu-link-gbps", "45"]) == 0
    gpu = TimingFile.read(out).gpu
    assert (gpu.name, gpu.memory_gb, gpu.link_gbps) == ("H100", 40.0, 45.0)
    assert main([*fit, "--gpu-memory", "15GB"]) == 2  # the weights do not fit


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            ["gpu.memory=40GB", "engine.num_gpu_blocks=9"],
            "gpu.memory and num_gpu_blocks (--num-gpu-blocks) both set",
        ),
        (["gpu.weights=4GB", "engine.num_gpu_blocks=9"], "gpu.weights and num_gpu_blocks"),
        (["gpu.overhead=4GB", "engine.num_gpu_blocks=9"], "gpu.overhead and num_gpu_blocks"),
        (
            ["gpu.gpu_memory_utilization=0.5", "engine.num_gpu_blocks=9"],
            "gpu_memory_utilization and num_gpu_blocks",
        ),
        (
            ["gpu.front_end_ms=4", "engine.timing.kind=polynomial"],
            "front_end_ms has no effect with engine.timing",
        ),
        (
            ["gpu.link_gbps=4", "engine.timing.kind=polynomial"],
            "gpu.link_gbps has no effect with engine.timing",
        ),
        (
            ["engine.num_gpu_blocks=9", "engine.timing.kind=polynomial"],
            "gpu has no effect with engine.timing",
        ),
        (["gpu.aiconfigurator=true", "gpu.link_gbps=4"], "gpu.link_gbps has no effect on aiconfigurator"),
    ],
)
def test_what_changes_nothing_beside_blocks_or_times_that_were_given_is_refused(
    said: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        ReplaySettings.read(None, {}, [*H100, *said])
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    "said",
    [
        ["engine.num_gpu_blocks=9"],
        ["engine.timing.kind=polynomial"],
        ["engine.timing.kind=polynomial", "gpu.memory=40GB"],
        ["engine.num_gpu_blocks=9", "gpu.front_end_ms=4"],
    ],
)
def test_a_gpu_serves_for_what_the_engine_was_not_told(said: list[str]) -> None:
    ReplaySettings.read(None, {}, [*H100, *said])


def test_a_gpu_is_compared_with_that_of_a_timing_file_though_it_gives_nothing(tmp_path: Path) -> None:
    path = tmp_path / "timing.yaml"
    path.write_text(CALIBRATED.text())
    engine = {"timing": TimingFile.read(path).setting(), "num_gpu_blocks": 9}
    ReplaySettings.read(None, {"engine": engine}, list(H100))
    with pytest.raises(ConfigError, match="but here gpu is A100"):
        ReplaySettings.read(None, {"engine": engine}, ["model=Llama-3.1-8B", "gpu.name=A100"])


@pytest.mark.parametrize(
    ("field", "value"),
    [("link_gbps", 4.0), ("weight_dtype", "fp8"), ("data_parallel_size", 2), ("front_end_ms", 0.0)],
)
def test_what_tells_how_long_steps_take_is_refused_where_only_blocks_follow(field: str, value: Any) -> None:
    blocks_alone: dict[str, Any] = {"memory": "80GiB", "weights": "16GB"}
    GpuSettings(**blocks_alone)
    with pytest.raises(ConfigError, match=f"^{field} affects step times"):
        GpuSettings(**blocks_alone, **{field: value})


def test_a_planners_profile_wins_over_the_times_of_a_gpu(tmp_path: Path) -> None:
    grid = np.array([1.0, 1000.0])
    path = tmp_path / "profile.npz"
    np.savez(
        path,
        prefill_isl=grid,
        prefill_ttft_ms=grid,
        decode_active_kv_tokens=grid,
        decode_context_length=grid,
        decode_itl=np.ones((2, 2)),
    )
    found = ReplaySettings.read(None, {"engine": {"planner_profile_data": str(path)}}, list(H100))
    assert "planner's profile" in found.engine.timing.describe_origin()


def test_a_server_refuses_our_flags_that_do_nothing_and_tells_vllms() -> None:
    serve = ["Llama-3.1-8B", "--gpu", "H100"]
    plan = read_serve([*serve, "--num-gpu-blocks-override", "99", "--gpu-memory-utilization", "0.5"])
    assert plan.idle == ["gpu-memory-utilization"]
    assert read_serve([*serve, "--gpu-memory-utilization", "0.5"]).idle == []
    with pytest.raises(ConfigError, match=r"gpu\.memory and num_gpu_blocks .*both set"):
        read_serve([*serve, "--num-gpu-blocks", "99", "--gpu-memory", "40GB"])
    with pytest.raises(ConfigError, match="gpu has no effect with"):
        read_serve([*serve, "--num-gpu-blocks", "99", "--timing", "polynomial"])

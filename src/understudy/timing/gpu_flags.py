"""GPU flags, equal in every verb, and the settings that `--timing` selects."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from understudy.errors import ConfigError


class GpuFlag(NamedTuple):
    """A setting of `gpu` as a flag; `kind` bool is a flag without a value."""

    field: str
    kind: Literal["str", "int", "float", "bool"]
    metavar: str
    help: str


GPU_FLAGS = {
    "gpu": GpuFlag(
        "name",
        "str",
        "NAME",
        "GPU: H100, H200, B200, A100, L40S, RTX-4090 or RTX-PRO-6000; by data sheet alone: B300, GB200, GB300, H20, "
        "GH200, RTX-5090, L4, A10G, MI300X, MI325X, MI355X",
    ),
    "gpu-bandwidth-gbps": GpuFlag("bandwidth_gbps", "float", "X", "memory bandwidth of a custom GPU, GB/s"),
    "gpu-tflops": GpuFlag(
        "tflops", "float", "X", "peak of dense bf16 matrix products of a custom GPU, TFLOP/s"
    ),
    "gpu-link-gbps": GpuFlag(
        "link_gbps", "float", "X", "bandwidth of the GPU's link to other GPUs, per direction, GB/s"
    ),
    "gpu-memory": GpuFlag(
        "memory",
        "str",
        "SIZE",
        "memory of the GPU, such as 80GiB; without --gpu it sets only the number of blocks",
    ),
    "gpu-weights": GpuFlag(
        "weights", "str", "SIZE", "weights of the whole model, such as 16GiB (default: from its architecture)"
    ),
    "gpu-memory-utilization": GpuFlag(
        "gpu_memory_utilization",
        "float",
        "X",
        "share of the GPU's memory to use (default: the release's: 0.92, before vLLM 0.20 0.9)",
    ),
    "weight-dtype": GpuFlag(
        "weight_dtype",
        "str",
        "NAME",
        "type of the weights: bf16, fp8, int4, mxfp4 or nvfp4 (default: the model's)",
    ),
    "tensor-parallel-size": GpuFlag("tensor_parallel_size", "int", "N", "GPUs per worker (default: 1)"),
    "pipeline-parallel-size": GpuFlag(
        "pipeline_parallel_size",
        "int",
        "N",
        "stages per worker, each with a part of the layers on --tensor-parallel-size GPUs (default: 1)",
    ),
    "stage-link-gbps": GpuFlag(
        "stage_link_gbps",
        "float",
        "X",
        "bandwidth of the link from a GPU to that of the next stage, per direction, GB/s (default: the GPU's link)",
    ),
    "data-parallel-size": GpuFlag(
        "data_parallel_size",
        "int",
        "N",
        "data-parallel ranks of each engine, which share its experts (default: 1)",
    ),
    "expert-parallel-size": GpuFlag(
        "expert_parallel_size", "int", "N", "number of expert-parallel groups (default: 1)"
    ),
    "enable-expert-parallel": GpuFlag(
        "enable_expert_parallel", "bool", "", "place whole experts on GPUs instead of sharding each"
    ),
    "disable-hybrid-kv-cache-manager": GpuFlag(
        "disable_hybrid_kv_cache_manager",
        "bool",
        "",
        "plan windows as full attention, in one KV cache group",
    ),
    "front-end-ms": GpuFlag(
        "front_end_ms",
        "float",
        "MS",
        "time between client and engine (default: the preset's; 0: times inside the engine)",
    ),
    "extrapolate": GpuFlag(
        "extrapolate", "bool", "", "extrapolate past the ends of op tables instead of rejecting such steps"
    ),
}
RECORD_SUFFIX = ".jsonl"
"""Suffix of recorded steps; a file with another suffix is a timing file."""

KV_DTYPE_HELP = "data type of the KV cache: bf16 or fp8 (default: the model's own)"
TIMING_HELP = (
    "source of step times: a timing file, recorded steps (`understudy qwen3 bench --record`), a folder of op tables "
    "(with --gpu), aiconfigurator (with --gpu; extra [aiconfigurator]), physical (implied by --gpu), or polynomial "
    "(Dynamo mocker's generic polynomial; NOT a real GPU; the default without --gpu)"
)


def timing_settings(
    given: str | None, gpu: dict[str, Any], *, has_model: bool = False
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Convert --timing to settings of `gpu` and the setting `engine.timing` (None: times follow from the GPU).

    ConfigError names missing flags: a GPU, and a model unless `has_model`.
    """
    and_model = "" if has_model else " and --model"
    has_gpu = "name" in gpu or "bandwidth_gbps" in gpu
    if given is None:
        _reject_extrapolation(gpu)
        return gpu, None
    if Path(given).is_dir():
        if not has_gpu:
            raise ConfigError(f"--timing with a folder of op tables needs --gpu{and_model}")
        return {**gpu, "op_tables": given}, None
    _reject_extrapolation(gpu)
    if given in ("physical", "aiconfigurator"):
        if not has_gpu:
            raise ConfigError(f"--timing {given} needs --gpu (or its data sheet){and_model}")
        return ({**gpu, "aiconfigurator": True} if given == "aiconfigurator" else gpu), None
    if given == "polynomial":
        return gpu, {"kind": "polynomial"}
    if not Path(given).exists():
        raise ConfigError(
            f"--timing {given}: no such file or folder; names are physical, aiconfigurator and polynomial"
        )
    if Path(given).suffix == RECORD_SUFFIX:
        return gpu, {"kind": "recorded_steps", "path": given}
    from understudy.timing.timing_file import TimingFile  # slow to import, and every verb imports these flags

    return gpu, TimingFile.read(Path(given)).setting()


def _reject_extrapolation(gpu: dict[str, Any]) -> None:
    if gpu.get("extrapolate"):
        raise ConfigError("--extrapolate is for op tables; give their folder as --timing")

"""The settings `gpu` as flags, the same in every verb, and what `--timing` says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from understudy.errors import ConfigError


class GpuFlag(NamedTuple):
    """A field of the settings `gpu` as a flag; `kind` bool is a flag without a value."""

    field: str
    kind: Literal["str", "int", "float", "bool"]
    metavar: str
    help: str


GPU_FLAGS = {
    "gpu": GpuFlag("name", "str", "NAME", "H100, H200, B200, A100, L40S, RTX-4090 or RTX-PRO-6000"),
    "gpu-bandwidth-gbps": GpuFlag(
        "bandwidth_gbps", "float", "X", "or any GPU by its data sheet: of its memory, 10^9 bytes a second"
    ),
    "gpu-tflops": GpuFlag("tflops", "float", "X", "and its peak of dense bf16 products"),
    "gpu-link-gbps": GpuFlag("link_gbps", "float", "X", "and its link to the other GPUs, one direction"),
    "gpu-memory": GpuFlag("memory", "str", "SIZE", "its memory, such as 80GiB; alone, it gives blocks only"),
    "gpu-weights": GpuFlag(
        "weights", "str", "SIZE", "of the whole model, such as 16GiB, in place of its shape's"
    ),
    "gpu-memory-utilization": GpuFlag("gpu_memory_utilization", "float", "X", "of its memory (default: 0.9)"),
    "weight-dtype": GpuFlag(
        "weight_dtype", "str", "NAME", "bf16, fp8, int4, mxfp4 or nvfp4 (default: the model's)"
    ),
    "tensor-parallel-size": GpuFlag("tensor_parallel_size", "int", "N", "GPUs of a worker (default: 1)"),
    "data-parallel-size": GpuFlag(
        "data_parallel_size", "int", "N", "ranks that share experts, each a worker (default: 1)"
    ),
    "expert-parallel-size": GpuFlag(
        "expert_parallel_size", "int", "N", "groups that experts are dealt out to (default: 1)"
    ),
    "enable-expert-parallel": GpuFlag(
        "enable_expert_parallel", "bool", "", "deal experts out whole to all GPUs, do not cut them"
    ),
    "front-end-ms": GpuFlag(
        "front_end_ms",
        "float",
        "MS",
        "between client and engine (default: the preset's; 0: times of the engine)",
    ),
    "extrapolate": GpuFlag(
        "extrapolate", "bool", "", "go on past the ends of op tables, which refuse it otherwise"
    ),
}
RECORD_SUFFIX = ".jsonl"
"""Of recorded steps; a timing file has any other."""

TIMING_HELP = (
    "a timing file, recorded steps (`understudy qwen3 bench --record`), a folder of op tables (with --gpu), "
    "aiconfigurator (with --gpu; extra [aiconfigurator]), physical (implied by --gpu) or polynomial (of no GPU; the "
    "default without one)"
)


def timing_settings(
    given: str | None, gpu: dict[str, Any], *, has_model: bool = False
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What --timing means: the settings `gpu` with it, and the setting `engine.timing` (None: the GPU says it).

    ConfigError names what it needs beside it: a GPU, and a model unless that is known.
    """
    and_model = "" if has_model else " and --model"
    known = "name" in gpu or "bandwidth_gbps" in gpu
    if given is None:
        _no_extrapolation(gpu)
        return gpu, None
    if Path(given).is_dir():
        if not known:
            raise ConfigError(
                f"--timing with a folder of op tables needs --gpu{and_model}, whose tables they are"
            )
        return {**gpu, "op_tables": given}, None
    _no_extrapolation(gpu)
    if given in ("physical", "aiconfigurator"):
        if not known:
            raise ConfigError(f"--timing {given} needs --gpu (or its data sheet){and_model}")
        return ({**gpu, "aiconfigurator": True} if given == "aiconfigurator" else gpu), None
    if given == "polynomial":
        return gpu, {"kind": "polynomial"}
    if not Path(given).exists():
        raise ConfigError(
            f"--timing {given}: there is no such file or folder; names are physical, aiconfigurator and polynomial"
        )
    if Path(given).suffix == RECORD_SUFFIX:
        return gpu, {"kind": "recorded_steps", "path": given}
    from understudy.timing.timing_file import TimingFile  # heavy, and every verb describes these flags

    return gpu, TimingFile.read(Path(given)).setting()


def _no_extrapolation(gpu: dict[str, Any]) -> None:
    if gpu.get("extrapolate"):
        raise ConfigError("--extrapolate is for op tables: give their folder as --timing")

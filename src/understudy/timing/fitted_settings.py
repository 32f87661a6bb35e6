"""Settings that a run takes from a timing file: the model, the GPU and the parallel sizes that were fitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import GPUS
from understudy.timing.weight_types import kv_type, weight_type

if TYPE_CHECKING:
    from understudy.timing.deployment import Deployment
    from understudy.timing.fitted_engine import FittedEngine

_SHEET = ("bandwidth_gbps", "tflops", "memory", "link_gbps")


def find_fitted_model(fitted: Deployment, engine: FittedEngine | None) -> str | None:
    """Return a name or path under which this machine knows the fitted model; None if there is none."""
    names = [*([] if engine is None else [engine.model]), fitted.model.name]
    for name in names:
        try:
            if find_architecture(name).shape == fitted.model.shape:
                return name
        except (ConfigError, OSError):
            continue
    return None


def fitted_gpu_settings(fitted: Deployment, engine: FittedEngine | None, model: str | None) -> dict[str, Any]:
    """Return the settings of `gpu` that describe the fitted deployment, of `model` as this machine knows it."""
    gpu, parallel = fitted.gpu, fitted.parallel
    settings: dict[str, Any]
    if gpu.name in GPUS:
        settings = {"name": gpu.name}
        if gpu.memory_gb != GPUS[gpu.name].memory_gb and (engine is None or engine.blocks_estimated):
            settings["memory"] = round(gpu.memory_gb * 1e9)
    else:
        settings = {
            "bandwidth_gbps": gpu.bandwidth_gbps,
            "tflops": gpu.bf16_tflops,
            "memory": round(gpu.memory_gb * 1e9),
            "link_gbps": gpu.link_gbps,
        }
    if parallel.tensor > 1:
        settings["tensor_parallel_size"] = parallel.tensor
    if parallel.pipeline > 1:
        settings["pipeline_parallel_size"] = parallel.pipeline
        if parallel.stage_link_gbps is not None:
            settings["stage_link_gbps"] = parallel.stage_link_gbps
    if parallel.data > 1:
        settings["data_parallel_size"] = parallel.data
    if parallel.expert > 1 and parallel.expert == parallel.tensor * parallel.data:
        settings["enable_expert_parallel"] = True
    elif parallel.expert > 1:
        settings["expert_parallel_size"] = parallel.expert
    if model is None or weight_type(find_architecture(model).weights) != weight_type(fitted.weights):
        settings["weight_dtype"] = fitted.weights
    if engine is not None and engine.blocks_estimated:
        settings["gpu_memory_utilization"] = engine.gpu_memory_utilization
    return settings


def fitted_kv_dtype(fitted: Deployment) -> str | None:
    """Return the type of the fitted KV cache; None for bf16, the default."""
    return None if kv_type(fitted.kv) == "bf16" else fitted.kv


def merge_fitted_gpu(fitted: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the fitted GPU's settings with the given ones over them; whole GPUs replace each other."""
    kept = dict(fitted)
    if "name" in given:
        kept = {name: value for name, value in kept.items() if name not in _SHEET}
    elif "bandwidth_gbps" in given:
        kept = {name: value for name, value in kept.items() if name not in ("name", *_SHEET)}
    if "enable_expert_parallel" in given or "expert_parallel_size" in given:
        kept.pop("enable_expert_parallel", None)
        kept.pop("expert_parallel_size", None)
    return {**kept, **given}

"""Check that fitted times are used only for the deployment that they were fitted to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.timing.architecture import Architecture
from understudy.timing.find_architecture import find_architecture
from understudy.timing.gpus import Gpu
from understudy.timing.weight_types import kv_type, weight_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from understudy.timing.deployment import Deployment

_EXPERT_SETTINGS = ("data_parallel_size", "expert_parallel_size")
"""Settings that affect only models with experts, because ranks of a dense model are independent."""


def facts_of(deployment: Deployment) -> dict[str, Any]:
    """Return the facts of a deployment by the names of their settings."""
    parallel = deployment.parallel
    return {
        "model": deployment.model,
        "gpu": deployment.gpu,
        "weight_dtype": deployment.weights,
        "kv_dtype": deployment.kv,
        "tensor_parallel_size": parallel.tensor,
        "data_parallel_size": parallel.data,
        "expert_parallel_size": parallel.expert,
        "pipeline_parallel_size": parallel.pipeline,
    }


def check_fitted_for(timing: object, asked: Mapping[str, Any]) -> None:
    """Raise ConfigError, naming the differences, if `timing` was fitted to another deployment than `asked`.

    Timing models without a deployment pass, and so do facts that `asked` lacks (None). Models are compared by their
    dimensions; unknown models are not compared.
    """
    fitted: Deployment | None = getattr(timing, "fitted_for", None)
    if fitted is None:
        return
    differences = []
    for name, own in facts_of(fitted).items():
        value = asked.get(name)
        if value is None or (name in _EXPERT_SETTINGS and not fitted.model.num_experts):
            continue
        if name == "model" and isinstance(value, str):
            try:
                value = find_architecture(value)
            except ConfigError:
                continue
        if _normalise(name, value) != _normalise(name, own):
            differences.append(f"{name} is {getattr(value, 'name', value)}")
    if differences:
        parallel = fitted.parallel
        raise ConfigError(
            f"timing was fitted to {fitted.model.name} in {fitted.weights} (KV {fitted.kv}) on "
            f"{parallel.gpus} × {fitted.gpu.name}, but here {' and '.join(differences)}; give the "
            "file of this deployment (understudy calibrate fits one), or leave --timing out for the times of --gpu"
        )


def _normalise(name: str, value: Any) -> object:
    """Return a value that is equal for all names of one model, GPU or type."""
    if isinstance(value, Architecture):
        return value.shape
    if isinstance(value, Gpu):
        # Known GPUs are compared by name, because later versions may correct their numbers.
        numbers = (value.bandwidth_gbps, value.bf16_tflops, value.link_gbps)
        return (value.name, numbers if value.name == "data sheet" else ())
    try:
        if name == "weight_dtype":
            return weight_type(value).name
        return kv_type(value) if name == "kv_dtype" else value
    except ConfigError:
        return value  # an unknown type

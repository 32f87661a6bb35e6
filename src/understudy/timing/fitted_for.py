"""Whose times they are: a fit is of one deployment, and says nothing of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.errors import ConfigError
from understudy.timing.architecture import Architecture
from understudy.timing.gpus import Gpu
from understudy.timing.weight_types import kv_type, weight_type

if TYPE_CHECKING:
    from collections.abc import Mapping

    from understudy.timing.deployment import Deployment

_AMONG_EXPERTS = ("data_parallel_size", "expert_parallel_size")
"""Divisions that only experts notice: ranks of a dense model have nothing in common."""


def facts_of(deployment: Deployment) -> dict[str, Any]:
    """A deployment under the names of settings."""
    parallel = deployment.parallel
    return {
        "model": deployment.model,
        "gpu": deployment.gpu,
        "weight_dtype": deployment.weights,
        "kv_dtype": deployment.kv,
        "tensor_parallel_size": parallel.tensor,
        "data_parallel_size": parallel.data,
        "expert_parallel_size": parallel.expert,
    }


def check_fitted_for(timing: object, asked: Mapping[str, Any]) -> None:
    """Refuse a fit of another deployment than what is asked for, as far as that is said (None: it is not).

    `timing` is any timing model; those that are of no deployment in particular pass. A model is compared by its shape,
    and one that is not known by nothing. ConfigError names all that differs.
    """
    fitted: Deployment | None = getattr(timing, "fitted_for", None)
    if fitted is None:
        return
    here = []
    for name, own in facts_of(fitted).items():
        value = asked.get(name)
        if value is None or (name in _AMONG_EXPERTS and not fitted.model.num_experts):
            continue
        if name == "model" and isinstance(value, str):
            try:
                value = Architecture.find(value)
            except ConfigError:
                continue
        if _plain(name, value) != _plain(name, own):
            here.append(f"{name} is {getattr(value, 'name', value)}")
    if here:
        parallel = fitted.parallel
        raise ConfigError(
            f"timing was fitted to {fitted.model.name} in {fitted.weights} (KV {fitted.kv}) on "
            f"{parallel.tensor * parallel.data} × {fitted.gpu.name}, but here {' and '.join(here)}; give the file of "
            "this deployment (understudy calibrate fits one), or leave --timing out for the times of --gpu"
        )


def _plain(name: str, value: Any) -> object:
    """What two of the same have in common, however they are called."""
    if isinstance(value, Architecture):
        return value.shape
    if isinstance(value, Gpu):
        # By name, since later versions may have better numbers of it; a data sheet is its numbers.
        numbers = (value.bandwidth_gbps, value.bf16_tflops, value.link_gbps)
        return (value.name, numbers if value.name == "data sheet" else ())
    try:
        if name == "weight_dtype":
            return weight_type(value).name
        return kv_type(value) if name == "kv_dtype" else value
    except ConfigError:
        return value  # a type of which there are no times

"""Models whose step times are known, and the stages that they may be divided into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.errors import ConfigError
from understudy.groups import layers_of_model
from understudy.timing.find_architecture import find_architecture

if TYPE_CHECKING:
    from understudy.timing.architecture import Architecture


def check_stages(stages: int, link_gbps: float | None, *, has_kernels: bool) -> None:
    """Raise ConfigError for a link without stages, and for stages whose times are those of measured kernels."""
    if link_gbps is not None and stages == 1:
        raise ConfigError(
            "stage_link_gbps is for the stages of a pipeline; give pipeline_parallel_size, or leave it out"
        )
    if stages > 1 and has_kernels:
        raise ConfigError(
            f"pipeline_parallel_size={stages}: op tables and aiconfigurator have no times of stages; leave one of them "
            "out"
        )


def refuse_stages_of_groups(stages: int) -> None:
    """Raise ConfigError for KV cache groups that are planned for stages."""
    if stages > 1:
        raise ConfigError(
            f"pipeline_parallel_size={stages}: KV cache groups of stages are not planned yet; leave it out, or give "
            "--disable-hybrid-kv-cache-manager"
        )


def find_timed_architecture(model: str) -> Architecture:
    """Find the architecture of a model. ConfigError for one of which only the KV cache groups are known."""
    try:
        return find_architecture(model)
    except ConfigError as error:
        problem, found, _ = str(error).partition("; give measured times")
        is_name = "is neither a known name" in problem
        try:
            layers_of_model(model)
        except ConfigError:
            raise error from None
        if not found and not is_name:
            raise
        reason = f"model {model!r} has known KV cache groups, but no known step times" if is_name else problem
        raise ConfigError(
            f"{reason}; give measured times (--timing) and, in place of --gpu, the memory of a GPU and the weights "
            "(--gpu-memory, --gpu-weights)"
        ) from error

"""Name the checkpoint and the GPU memory of a printed command, and refuse what no command can express."""

from __future__ import annotations

from typing import TYPE_CHECKING

from understudy.engines.kinds.registry import kind_of
from understudy.errors import ConfigError
from understudy.run.fitted_times import fitted_deployment
from understudy.timing.find_architecture import find_architecture
from understudy.timing.weight_types import kv_type, weight_type

if TYPE_CHECKING:
    from understudy.sweep.candidate import Candidate
    from understudy.tiers.gpu import GpuSettings


def name_of_model(candidate: Candidate) -> str | None:
    """Return the model as given, or as the timing file names it."""
    fitted = fitted_deployment(candidate.settings.engine)
    return candidate.model or (None if fitted is None else fitted.model.name)


def quantizes_kv(candidate: Candidate) -> bool:
    """Whether the KV cache is in fp8."""
    return candidate.kv_dtype not in (None, "auto") and kv_type(str(candidate.kv_dtype)) == "fp8"


def quantizes_weights(candidate: Candidate) -> bool:
    """Whether the engine itself quantizes weights of another type to fp8."""
    gpu = candidate.settings.gpu
    if gpu is None or gpu.weight_dtype in (None, "auto"):
        return False
    return weight_type(str(gpu.weight_dtype)).name == "fp8" and _own_weights(candidate) != "fp8"


def name_other_checkpoint(candidate: Candidate) -> str | None:
    """Return the type of the weights where the model must be loaded from another checkpoint than its own."""
    gpu = candidate.settings.gpu
    if gpu is None or gpu.weight_dtype in (None, "auto"):
        return None
    asked = weight_type(str(gpu.weight_dtype)).name
    return None if asked in ("fp8", _own_weights(candidate)) else asked


def _own_weights(candidate: Candidate) -> str | None:
    """Return the type of the model's own weights; None if it is not known."""
    model = name_of_model(candidate)
    try:
        return None if model is None else weight_type(find_architecture(model).weights).name
    except (ConfigError, OSError):
        return None


def has_whole_experts(gpu: GpuSettings) -> bool:
    """Whether every GPU of an engine holds whole experts: one expert-parallel group per GPU."""
    return gpu.enable_expert_parallel or (gpu.num_gpus > 1 and gpu.expert_parallel_size == gpu.num_gpus)


def changes_memory(gpu: GpuSettings) -> bool:
    """Whether the memory was set otherwise than a real engine measures it, so that only blocks can be named."""
    return any(size is not None for size in (gpu.weights, gpu.overhead, gpu.memory if gpu.name else None))


def refuse_unspoken(candidate: Candidate) -> None:
    """Raise ConfigError for a setting that changes GPUs or their memory and that no flag of the engine expresses."""
    gpu, engine = candidate.settings.gpu, candidate.settings.engine
    if gpu is None or gpu.expert_parallel_size in (None, 1) or has_whole_experts(gpu):
        return
    kind = kind_of(engine)
    if kind.launch is not None and not kind.launch.splits_experts:
        raise ConfigError(
            f"expert_parallel_size={gpu.expert_parallel_size}: {kind.title} has one group of experts, or one per GPU; "
            "leave it out, or give --enable-expert-parallel"
        )

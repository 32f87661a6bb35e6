"""Take model, GPUs, ranks and KV blocks from the deployment that a run's step times were fitted to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from understudy.defaults import is_default
from understudy.engines.kinds.registry import kind_of
from understudy.errors import ConfigError
from understudy.run.fitted_times import find_engine, fitted_deployment
from understudy.tiers.gpu import GpuSettings
from understudy.timing.fitted_settings import (
    find_fitted_model,
    fitted_gpu_settings,
    fitted_kv_dtype,
    merge_fitted_gpu,
)

if TYPE_CHECKING:
    from typing import TypeVar

    from understudy.engines.engine_config import EngineConfig

    _Engine = TypeVar("_Engine", bound=EngineConfig)


class Fitted(NamedTuple):
    """The fitted deployment as settings of a run."""

    model: str | None
    """Name or path under which this machine knows the model; None: it is not known here."""
    kv_dtype: str | None
    gpu: dict[str, Any]
    """Settings of `gpu`, the given ones included."""

    @property
    def kv_size(self) -> dict[str, str | None]:
        """Settings that size the KV cache; empty if the model is not known."""
        return {} if self.model is None else {"model": self.model, "kv_dtype": self.kv_dtype}


def take_fitted(engine: EngineConfig, gpu: dict[str, Any], *, has_blocks: bool) -> Fitted | None:
    """Complete the given settings of `gpu` by the fitted deployment; None if the times are of none."""
    deployment = fitted_deployment(engine)
    if deployment is None:
        return None
    own = find_engine(engine)
    model = find_fitted_model(deployment, own)
    settings = fitted_gpu_settings(deployment, own, model)
    if has_blocks:
        for name in ("gpu_memory_utilization", *(("memory",) if "name" in settings else ())):
            settings.pop(name, None)
    return Fitted(model, fitted_kv_dtype(deployment), merge_fitted_gpu(settings, gpu))


def describe_fitted_gpu(engine: EngineConfig) -> GpuSettings | None:
    """Return the GPUs that the engine's step times were fitted to; None for other times."""
    fitted = take_fitted(engine, {}, has_blocks=True)
    return None if fitted is None else GpuSettings(**fitted.gpu)


def use_fitted_block_size(engine: _Engine) -> _Engine:
    """Set the block size that was fitted, unless one was given. ConfigError for an engine of another kind."""
    own = find_engine(engine)
    if own is None:
        return engine
    kind = kind_of(engine)
    if kind.name != own.name:
        raise ConfigError(
            f"engine: timing was fitted to {own.name}, but here the engine is {kind.name}; give the file of this "
            "engine (understudy calibrate fits one), or leave --timing out for the times of --gpu"
        )
    if kind.sizes_pool_in_tokens or not is_default(engine.block_size) or engine.kv_cache_groups:
        return engine
    return msgspec.structs.replace(engine, block_size=own.block_size)


def fitted_blocks(engine: EngineConfig, gpu: GpuSettings) -> int | None:
    """Return the KV blocks of the fitted deployment; None if they are not known, or are other ones here."""
    own = find_engine(engine)
    if own is None or own.blocks_estimated or own.block_size != engine.block_size:
        return None
    sizes = (gpu.weights, gpu.overhead, gpu.memory if gpu.name is not None else None)
    if any(size is not None for size in sizes):
        return None
    if gpu.gpu_memory_utilization not in (None, own.gpu_memory_utilization):
        return None
    return own.num_gpu_blocks


def apply_fitted_blocks(
    gpu: GpuSettings, engine: _Engine, model: str | None, *, has_blocks: bool
) -> tuple[_Engine, tuple[str, ...], bool]:
    """Set the blocks of the fitted deployment unless blocks are given; return whether the blocks are set, and notes.

    ConfigError if they are unknown and cannot be estimated, because only the timing file knows the model.
    """
    deployment = fitted_deployment(engine)
    if has_blocks or deployment is None:
        return engine, (), has_blocks
    blocks = fitted_blocks(engine, gpu)
    if blocks is not None:
        note = f"{blocks:,} KV blocks of {engine.block_size} tokens per worker, from the timing file"
        return msgspec.structs.replace(engine, num_gpu_blocks=blocks), (note,), True
    if model is None:
        raise ConfigError(
            f"model: {deployment.model.name} of the timing file is not known here, so that its KV blocks cannot be "
            "estimated; give --model with the path of its config.json, or --num-gpu-blocks"
        )
    if find_engine(engine) is not None:
        return engine, (), False
    note = (
        "the timing file is an older one without block size, KV blocks and share of memory, which are estimated or "
        "defaults; give --block-size and --num-gpu-blocks, or write the file again with understudy calibrate"
    )
    return engine, (note,), False


def steps_together(gpu: GpuSettings, engine: EngineConfig, model: str | None, kv_dtype: str | None) -> bool:
    """Whether the ranks of an engine share experts; the timing file says so of a model that only it knows."""
    deployment = fitted_deployment(engine)
    if model is None and deployment is not None:
        return deployment.steps_together
    return gpu.steps_together(model, kv_dtype)

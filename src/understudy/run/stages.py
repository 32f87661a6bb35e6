"""Stages of a pipeline: engine and GPUs have the same number of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from understudy.engines.kinds.registry import kind_of
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from typing import TypeVar

    from understudy.engines.engine_config import EngineConfig
    from understudy.tiers.gpu import GpuSettings

    _Engine = TypeVar("_Engine", bound=EngineConfig)


def join_stages(engine: _Engine, gpu: GpuSettings) -> tuple[_Engine, GpuSettings]:
    """Give engine and GPUs the same number of stages, however it was asked for; ConfigError if both give one."""
    own, asked = engine.num_stages, gpu.pipeline_parallel_size
    if own == asked:
        return engine, gpu
    if own > 1 and asked > 1:
        raise ConfigError(
            f"engine.pipeline_parallel_size={own} contradicts gpu.pipeline_parallel_size={asked} "
            "(--pipeline-parallel-size); give one"
        )
    if asked > 1:
        if "pipeline_parallel_size" not in engine.__struct_fields__:
            raise ConfigError(
                f"pipeline_parallel_size={asked}: pipelines of {kind_of(engine).title} are not simulated; leave "
                "it out, or choose --engine vllm"
            )
        return msgspec.structs.replace(engine, pipeline_parallel_size=asked), gpu
    if not gpu.is_known:
        raise ConfigError(
            f"pipeline_parallel_size={own}: memory and weights alone do not give the blocks of a stage; give gpu.name "
            "(--gpu) or a data sheet, or num_gpu_blocks"
        )
    return engine, msgspec.structs.replace(gpu, pipeline_parallel_size=own)

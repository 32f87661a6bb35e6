"""Derive step times, KV blocks and workers from a model and the GPU that it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from understudy.defaults import is_default
from understudy.errors import ConfigError
from understudy.run.model_groups import size_group_tiers
from understudy.run.ranks import check_stepping_together, join_ranks
from understudy.run.settings import apply_gpus
from understudy.tiers.gpu import GpuSettings
from understudy.tiers.settings import TiersConfig
from understudy.tiers.sizes import parse_bytes

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig


class Placement(NamedTuple):
    """Engine and tiers of a model on its GPUs, with notes for the report."""

    engine: EngineConfig
    tiers: TiersConfig | None
    ranks: bool
    notes: tuple[str, ...]


def place_on_gpu(
    model: str | None,
    gpu: str | GpuSettings,
    engine: EngineConfig,
    tiers: TiersConfig | None,
) -> Placement:
    """Return the settings of `model` on `gpu`; what `engine` was given is kept."""
    gpus = GpuSettings(name=gpu) if isinstance(gpu, str) else gpu
    if not isinstance(gpus, GpuSettings):
        raise ConfigError(f"gpu must be the name of a GPU or GpuSettings, got {gpu!r}")
    below = tiers or TiersConfig()
    if model is not None and below.model is not None and below.model != model:
        raise ConfigError(f"model: {model} contradicts tiers.model={below.model}; give one")
    model = model or below.model
    if model is None:
        raise ConfigError("gpu: step times need a model; give model, such as Llama-3.1-8B")
    has_blocks = not is_default(engine.num_gpu_blocks)
    has_timing = engine.timing != type(engine)().timing
    if gpus.is_known:
        gpus.reject_unused_settings(engine.timing, has_blocks=has_blocks, has_timing=has_timing)
    engine, joined = join_ranks(engine, gpus)
    assert joined is not None
    alone, gpus = engine, joined
    engine, notes = apply_gpus(
        gpus, engine, model, below.kv_dtype, has_blocks=has_blocks, has_timing=has_timing
    )
    if tiers is not None and tiers.tiers and tiers.model is None and tiers.kv_bytes_per_token is None:
        tiers = msgspec.structs.replace(tiers, model=model)
    if tiers is not None:
        tiers = size_group_tiers(tiers, gpus, alone, engine, model)
    together = gpus.steps_together(model, below.kv_dtype)
    check_stepping_together(engine, together=together)
    return Placement(engine, tiers, together, notes)


def find_weight_bytes(gpus: GpuSettings, model: str | None, kv_dtype: str | None) -> int | None:
    """Return the weight bytes of a worker on all of its GPUs; None if they are not known."""
    if gpus.weights is not None:
        return parse_bytes("gpu.weights", gpus.weights)
    if model is None or not gpus.is_known:
        return None
    deployed = gpus.deployment(model, kv_dtype)
    return sum(deployed.stage_weight_bytes) * deployed.parallel.tensor

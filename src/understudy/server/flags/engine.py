"""Builds the engine that the flags of `understudy serve` describe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from understudy.checks import read_as
from understudy.engines.kinds.registry import DEFAULT_ENGINE, kind_of
from understudy.engines.mocker_settings import MockerSettings
from understudy.errors import ConfigError
from understudy.server.flags.grammar import vllm_flags
from understudy.server.latency import LATENCIES
from understudy.tiers.gpu import GpuSettings
from understudy.timing.fitted_for import check_fitted_for
from understudy.timing.gpu_flags import GPU_FLAGS, timing_settings
from understudy.user_code import names_file_and_class

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig
    from understudy.tiers.settings import TiersConfig


def list_engine_flags(config_class: type[EngineConfig]) -> dict[str, str]:
    """Return the settings of a class that flags of vLLM and our own give, by flag."""
    fields = (*config_class.__struct_fields__, *MockerSettings.__struct_fields__)
    return {
        **{field.replace("_", "-"): field for field in fields},
        "num-gpu-blocks-override": "num_gpu_blocks",
    }


ENGINE_FLAGS = list_engine_flags(type(DEFAULT_ENGINE))
"""Flags that set the engine setting of the same name."""
IDLE_WITHOUT = {
    "max-loras": "enable_lora",
    "long-prefill-token-threshold-adaptive": "long_prefill_token_threshold",
    "prefix-cache-retention-interval": "kv_cache_groups",
    "prefix-match-unit": "kv_cache_groups",
}
"""Flags that have no effect without these engine settings, as in vLLM; the server reports them."""


class BuiltEngine(NamedTuple):
    """An engine, and how its KV cache groups followed from the GPU."""

    engine: EngineConfig
    without_groups: EngineConfig
    """The engine before groups were derived from its model."""
    gpu: GpuSettings | None = None
    kv_dtype: str | None = None
    notes: tuple[str, ...] = ()
    """Notes on derived groups and blocks, for the start."""

    def size_tiers(self, tiers: TiersConfig) -> TiersConfig:
        """Size tiers that name a model for its KV cache groups, if the engine's groups follow from the GPU."""
        from understudy.run.model_groups import size_group_tiers

        if self.gpu is None:
            return tiers
        kv_dtype = tiers.kv_dtype or self.kv_dtype
        typed = tiers if tiers.model is None else msgspec.structs.replace(tiers, kv_dtype=kv_dtype)
        sized = size_group_tiers(typed, self.gpu, self.without_groups, self.engine, tiers.model)
        return tiers if sized is typed else sized


def build_engine(
    values: dict[str, Any], max_model_len: int | None, model: str, config_class: type[EngineConfig]
) -> BuiltEngine:
    """Build an engine from flags with vLLM's names and our own. ConfigError names an invalid flag."""
    settings: dict[str, Any] = {"max_model_len": max_model_len}
    for name, field in list_engine_flags(config_class).items():
        if name not in ("mocker", "tiers", "timing", "max-model-len") and values.get(name) is not None:
            settings[field] = values[name]
    return complete_engine(settings, values, model, config_class)


def complete_engine(
    settings: dict[str, Any], values: dict[str, Any], model: str | None, kind: type[EngineConfig]
) -> BuiltEngine:
    """Build an engine from its settings and the flags that engines of every kind have."""
    from understudy.run.fitted import take_fitted, use_fitted_block_size
    from understudy.run.settings import _merge, _parse_assignment, apply_gpus

    gpu = {about.field: values[name] for name, about in GPU_FLAGS.items() if values.get(name) is not None}
    named = None if values.get("timing") is None else str(values["timing"])
    gpu, timing = timing_settings(named, gpu, has_model=True)
    if timing is not None:
        settings["timing"] = timing
    for assignment in values.get("set") or ():
        settings = _merge(settings, _parse_assignment(assignment))
    policy = settings.get("eviction_policy")
    if isinstance(policy, str) and names_file_and_class(policy):
        raise ConfigError(
            f"eviction_policy {policy}: a live engine does not run a user's policy; replay it, or leave it out"
        )
    sizes = ("num_gpu_blocks", "max_total_tokens", "max_tokens", "max_gpu_total_bytes")
    has_blocks = any(name in settings for name in sizes)
    has_timing = "timing" in settings or "planner_profile_data" in settings
    _refuse_beside_constants(values, has_blocks=has_blocks, has_timing=has_timing)
    for name, needed in IDLE_WITHOUT.items():
        may_follow = needed == "kv_cache_groups" and has_gpu(values)  # the model on its GPU may have groups
        if values.get(name) is not None and not settings.get(needed) and not may_follow:
            settings.pop(ENGINE_FLAGS[name], None)
    engine = kind.from_dict(settings)
    dtype = values.get("kv-cache-dtype")
    fitted = None if has_gpu(values) else take_fitted(engine, gpu, has_blocks=has_blocks)
    engine = use_fitted_block_size(engine)
    if not has_gpu(values):
        for name in GPU_FLAGS if fitted is None else ():
            if values.get(name) is not None and f"--{name}" not in vllm_flags():
                raise ConfigError(
                    f"--{name} needs --gpu, or --gpu-bandwidth-gbps of its data sheet, or --gpu-memory with "
                    "--gpu-weights"
                )
        check_fitted_for(
            engine.timing,
            {
                "model": model,
                "kv_dtype": None if dtype == "auto" else dtype,
                **{f"{way}_parallel_size": values.get(f"{way}-parallel-size") for way in ("tensor", "data")},
            },
        )
        if fitted is None:
            return BuiltEngine(engine, engine, notes=_note_without_gpu(engine, model, values))
        gpu, model, dtype = fitted.gpu, fitted.model, dtype or fitted.kv_dtype
    there = read_as(GpuSettings, gpu, "gpu")
    if there.is_known:
        # These two are accepted, and reported as unused.
        ours = msgspec.structs.replace(there, gpu_memory_utilization=None, front_end_ms=None)
        ours.reject_unused_settings(engine.timing, has_blocks=has_blocks, has_timing=has_timing)
    kv = None if dtype is None else str(dtype)
    without_groups = engine
    engine, notes = apply_gpus(there, engine, model, kv, has_blocks=has_blocks, has_timing=has_timing)
    return BuiltEngine(engine.drop_unused_group_settings(), without_groups, there, kv, notes)


def _refuse_beside_constants(values: dict[str, Any], *, has_blocks: bool, has_timing: bool) -> None:
    """Raise ConfigError for flags that contradict constant latencies, which replace any timing model."""
    both = ("num-gpu-blocks", "num-gpu-blocks-override")
    if len({values[name] for name in both if values.get(name) is not None}) > 1:
        raise ConfigError(
            "--num-gpu-blocks and --num-gpu-blocks-override both say how many blocks there are; give one"
        )
    constant = next((f"--{name}" for name in LATENCIES if values.get(name) is not None), None)
    if constant is None:
        return
    if has_timing or values.get("timing") is not None:
        other = "--timing" if values.get("timing") is not None else "--set timing"
        raise ConfigError(f"{constant} and {other} both say how long steps take; give one")
    if has_blocks and has_gpu(values):
        raise ConfigError(
            f"--gpu changes nothing beside {constant}, which says how long steps take, and --num-gpu-blocks; leave it "
            "out, or one of them"
        )


def _note_without_gpu(engine: EngineConfig, model: str | None, values: dict[str, Any]) -> tuple[str, ...]:
    """Return a note that the groups of a model are not used, because they follow from its GPU."""
    from understudy.run.model_groups import has_uniform_layers

    is_asked = values.get("disable-hybrid-kv-cache-manager")  # one group is what the flag plans
    if not kind_of(engine).has_kv_cache_groups or engine.kv_cache_groups or is_asked or model is None:
        return ()
    try:
        if has_uniform_layers(model):
            return ()
    except ConfigError:
        return ()  # most served names are of no known model, and then nothing is derived from them
    return (
        f"without --gpu, {model} has one KV cache group of {engine.num_gpu_blocks:,} blocks of {engine.block_size} "
        "tokens, not the groups of its layers",
    )


def has_gpu(values: dict[str, Any]) -> bool:
    """Return True if the flags name a GPU, or the bandwidth of one, or its memory and the weights."""
    if values.get("gpu") is not None or values.get("gpu-bandwidth-gbps") is not None:
        return True
    return values.get("gpu-memory") is not None and values.get("gpu-weights") is not None

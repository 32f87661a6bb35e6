"""KV cache groups of an engine, from its model and the GPU that it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from understudy.defaults import BLOCK_SIZE, UNKNOWN_DEVICE, is_default
from understudy.engines.engine_config import EngineConfig
from understudy.engines.kinds.registry import kind_of
from understudy.engines.kv_groups import kv_cache_groups
from understudy.engines.profiles import NEWEST, find_profile
from understudy.errors import ConfigError
from understudy.groups import GroupPlan, groups_of_model, layers_of_model
from understudy.groups.of_model import config_of_model
from understudy.timing.capacity import BLOCKS_PLUS_MINUS
from understudy.timing.contexts import known_context

if TYPE_CHECKING:
    from understudy.tiers.gpu import GpuSettings
    from understudy.tiers.settings import TiersConfig
    from understudy.timing.drafter import Drafter

_Engine = TypeVar("_Engine", bound=EngineConfig)

_UNLIMITED_BYTES = 1 << 60
"""Memory for a plan whose number of blocks is not used."""


def has_uniform_layers(model: str) -> bool:
    """Whether all layers of `model` keep the same KV of every token, so that one group holds them.

    ConfigError for an unknown model, and for a file whose layers are not known.
    """
    layers = layers_of_model(model)
    return all(layer == layers[0] for layer in layers) and layers[0].is_full


def note_on_dtype(model: str) -> tuple[str, ...]:
    """Return a note if the file of `model` does not say its type, for which vLLM takes bfloat16."""
    config = config_of_model(model)
    if not config.is_without_dtype:
        return ()
    return (f"{config.where}: torch_dtype is missing: KV in bfloat16, as vLLM computes without it",)


def plan_model_groups(
    gpu: GpuSettings, engine: EngineConfig, model: str, kv_dtype: str | None, *, has_blocks: bool
) -> GroupPlan:
    """Plan the groups of `model` for this engine as vLLM does; with `has_blocks`, the number of blocks is not used.

    ConfigError if one request of the engine's `max_model_len` tokens does not fit.
    """
    settings: dict[str, Any] = {
        "block_size": None if is_default(engine.block_size) else engine.block_size,
        "async_scheduling": engine.asynchronous,
        "prefix_caching": engine.enable_prefix_caching,
        "prefix_match_unit": engine.prefix_match_unit,
    }
    # Without a limit any request may be submitted; a state without prefix caching has a block of the whole context.
    length = engine.max_model_len or (1 if engine.enable_prefix_caching else known_context(model))
    if length is None:
        raise ConfigError(f"max_model_len: the context of {model} is not known; give it")
    if has_blocks:
        return groups_of_model(
            model,
            memory_bytes=_UNLIMITED_BYTES,
            max_model_len=length,
            max_num_batched_tokens=engine.max_num_batched_tokens or UNKNOWN_DEVICE.max_num_batched_tokens,
            kv_dtype=kv_dtype,
            tensor_parallel=gpu.tensor_parallel_size,
            disable_hybrid=gpu.disable_hybrid_kv_cache_manager,
            **settings,
        )
    return gpu.with_share(engine.memory_share).groups(
        model,
        kv_dtype,
        max_model_len=length,
        step_tokens=engine.max_num_batched_tokens,
        sequences=engine.max_num_seqs,
        drafter=find_engine_drafter(gpu, engine, model, kv_dtype),
        **settings,
    )


def find_engine_drafter(
    gpu: GpuSettings, engine: EngineConfig, model: str | None, kv_dtype: str | None
) -> Drafter | None:
    """Return the drafter of the engine on a GPU whose memory it shares; None without one, or without its sizes.

    ConfigError names the missing sizes.
    """
    speculation = engine.speculative_config
    if speculation is None or not gpu.is_known:
        return None
    return speculation.drafter(gpu.deployment(model, kv_dtype))


def apply_model_groups(
    gpu: GpuSettings, engine: _Engine, model: str, kv_dtype: str | None, *, has_blocks: bool
) -> tuple[_Engine, tuple[str, ...]]:
    """Set the groups and the blocks of a model whose layers differ; return the engine and notes for the report.

    ConfigError for an engine or a release that is simulated with one group only.
    """
    plan = plan_model_groups(gpu, engine, model, kv_dtype, has_blocks=has_blocks)
    blocks = engine.num_gpu_blocks if has_blocks else plan.num_blocks - 1  # without vLLM's null block
    is_estimate = gpu.is_known and not has_blocks
    error = (
        f" (estimated, ± {round(blocks * BLOCKS_PLUS_MINUS):,}; for the exact number pass {engine.exact_pool_flags} "
        "start-up log)"
        if is_estimate
        else ""
    )
    needed = sum(group.blocks_per_request for group in plan.groups)
    if has_blocks and engine.max_model_len is not None and needed > blocks:
        raise ConfigError(
            f"max_model_len={engine.max_model_len} needs {needed} blocks in all KV cache groups of {model}, of which "
            f"there are {blocks}, as vLLM refuses too; give more --num-gpu-blocks, a smaller --max-model-len, or auto"
        )
    is_one = len(plan.groups) == 1 and plan.groups[0].layer.is_full
    if is_one:
        size = plan.groups[0].block_size
        engine = msgspec.structs.replace(engine, block_size=size, num_gpu_blocks=blocks)
        note = f"all layers of {model} are planned as full attention: {blocks:,} KV blocks of {size} tokens per worker"
        return engine, (f"{note}{error}",)
    _check_supported(engine, model, plan)
    kinds = ", ".join(f"{len(group.layers)} × {group.kind}" for group in plan.groups)
    grouped = msgspec.structs.replace(
        engine,
        kv_cache_groups=kv_cache_groups(plan),
        block_size=BLOCK_SIZE,  # the groups set it, also to a multiple that no engine alone may have
        num_gpu_blocks=blocks,
    )
    note = f"{len(plan.groups)} KV cache groups of {model} ({kinds} layers) share {blocks:,} blocks per worker{error}"
    return grouped, (note,)


def size_group_tiers(
    tiers: TiersConfig, gpu: GpuSettings, engine: EngineConfig, grouped: EngineConfig, model: str | None
) -> TiersConfig:
    """Size a host for the blocks of the pool that the groups of `model` share; `engine` had none, `grouped` has."""
    if (
        engine.kv_cache_groups
        or not grouped.kv_cache_groups
        or model is None
        or not tiers.tiers
        or tiers.kv_bytes_per_token is not None
    ):
        return tiers
    plan = plan_model_groups(gpu, engine, model, tiers.kv_dtype, has_blocks=True)
    per_token, rest = divmod(plan.bytes_per_block, plan.hash_block_size)
    if rest:
        raise ConfigError(
            f"tiers: blocks of {model} have {plan.bytes_per_block} bytes, which {plan.hash_block_size} tokens do not "
            "divide; give kv_bytes_per_token (--kv-bytes-per-token)"
        )
    return msgspec.structs.replace(tiers, kv_bytes_per_token=per_token, model=None, kv_dtype=None)


def _check_supported(engine: EngineConfig, model: str, plan: GroupPlan) -> None:
    """Raise ConfigError for an engine that has no KV cache groups."""
    what = f"{model} has {len(plan.groups)} KV cache groups"
    has_states = any(group.kind == "mamba" for group in plan.groups)  # no manager puts them in one group
    windows = "pass --disable-hybrid-kv-cache-manager to plan windows as full attention, in one group"
    kind = kind_of(engine)
    if not kind.has_kv_cache_groups:
        remedy = "choose --engine vllm" if has_states else windows
        raise ConfigError(f"model: {what}, which only the vLLM engine simulates; {remedy}")
    if engine.profile is not find_profile(NEWEST):
        remedy = f"choose {NEWEST}" if has_states else f"choose {NEWEST}, or {windows}"
        raise ConfigError(
            f"vllm_version: {what}, whose rules are those of vLLM {NEWEST}, got {kind.version_of(engine)}; {remedy}"
        )

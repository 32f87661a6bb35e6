"""Words of the command that starts one real engine, with flags of the chosen release only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.engines.kinds.registry import kind_of
from understudy.engines.mocker_settings import MockerSettings
from understudy.errors import ConfigError
from understudy.run.fitted import fitted_blocks
from understudy.run.fitted_times import find_engine
from understudy.run.own_pools import has_pools_of_memory
from understudy.sweep.checkpoints import (
    changes_memory,
    name_of_model,
    name_other_checkpoint,
    quantizes_kv,
    quantizes_weights,
)
from understudy.sweep.group_words import count_planned_blocks, find_planned_engine
from understudy.sweep.own_words import OwnWords
from understudy.sweep.sglang_words import SglangWords
from understudy.sweep.trtllm_words import TrtllmWords
from understudy.sweep.vllm_words import VllmWords
from understudy.timing.repositories import find_repository

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.kinds.launch import LaunchCommand
    from understudy.sweep.candidate import Candidate

MODEL = "MODEL"
"""Placeholder of a model that the settings do not name."""
OWN_WORDS: dict[str, OwnWords] = {
    "vllm": VllmWords(),
    "sglang": SglangWords(),
    "trtllm": TrtllmWords(),
}
"""Flags that one kind of engine has and others lack, by kind; a kind without an entry has none."""
_LEFT_OUT = ("num_gpu_blocks", "timing", "mocker", "tiers", "data_parallel_size")


def engine_words(candidate: Candidate, missing: list[str]) -> list[str]:
    """Return the words of the engine's command; append the settings that no flag expresses to `missing`.

    No words for a kind of engine without a command.
    """
    engine = candidate.settings.engine
    kind = kind_of(engine)
    words: list[str] = []
    if kind.launch is None:
        missing.append(f"the command of a {kind.title} engine, which is not known")
    else:
        own = OWN_WORDS.get(kind.name, OwnWords())
        given = _list_flags(candidate, kind.launch, own)
        own.add_features(given, candidate, missing)
        words = [*kind.launch.words, _name_model(candidate, missing), *_spell(given)]
    for field, default in msgspec.structs.asdict(MockerSettings()).items():
        if getattr(engine.mocker, field) != default:
            missing.append(f"{field}={getattr(engine.mocker, field)}")
    return words


def engine_image(engine: EngineConfig) -> str:
    """Return the container image of an engine's release. ConfigError for a kind of engine without one."""
    kind = kind_of(engine)
    if kind.launch is None:
        raise ConfigError(f"engine: no container image of {kind.title} is known; leave the manifest out")
    if kind.launch.tag_is_release:
        return f"{kind.launch.image}:{kind.version_of(engine)}"
    numbers = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?.*", kind.version_of(engine))
    tag = f"v{numbers[1]}.{numbers[2]}.{numbers[3] or 0}" if numbers else "latest"
    return f"{kind.launch.image}:{tag}"


def _list_flags(candidate: Candidate, launch: LaunchCommand, own: OwnWords) -> dict[str, Any]:
    """Return the flags of GPUs, memory and settings with their values."""
    gpu, engine = candidate.settings.gpu, candidate.settings.engine
    kind = kind_of(engine)
    given: dict[str, Any] = {}
    if gpu is not None:
        given[launch.tensor_parallel] = gpu.tensor_parallel_size
        own.add_parallelism(given, gpu)
        if quantizes_kv(candidate):
            given["kv-cache-dtype"] = launch.fp8_kv
        if quantizes_weights(candidate):
            given["quantization"] = "fp8"
    if engine.data_parallel_size > 1:
        given[launch.data_parallel] = engine.data_parallel_size
    if not _has_estimated_blocks(candidate):
        size = engine.block_size if kind.sizes_pool_in_tokens else 1
        given[launch.pool] = engine.num_gpu_blocks * size
    elif (share := _share_of(candidate)) != engine.memory_share or launch.always_gives_share:
        given[launch.memory_share] = share
    without = {*_LEFT_OUT, *launch.left_out, kind.version_setting}
    for field in engine.__struct_fields__:
        value = getattr(engine, field)
        if field in without or value is None:
            continue
        if field in launch.always or not own.chooses_itself(candidate, field):
            flag = launch.names.get(field, field.replace("_", "-"))
            given[flag] = msgspec.to_builtins(value, enc_hook=repr)
    return given


def _name_model(candidate: Candidate, missing: list[str]) -> str:
    """Return what an engine can load: a path, a repository as given, or that of a known name."""
    model = name_of_model(candidate)
    if model is None:
        return MODEL
    if (weights := name_other_checkpoint(candidate)) is not None:
        missing.append(f"{MODEL}: name a checkpoint of {model} in {weights}")
        return MODEL
    if "/" in model or Path(model).exists():
        return model
    if (found := find_repository(model)) is None:
        missing.append(f"model {model}: name its repository, such as --model owner/{model}")
    return found or model


def _has_estimated_blocks(candidate: Candidate) -> bool:
    """Whether the number of KV blocks was estimated from the GPU's memory, as the engine itself does."""
    settings, engine = candidate.settings, candidate.settings.engine
    gpu = settings.gpu
    if gpu is None or not gpu.is_known:
        return False
    if fitted_blocks(engine, gpu) == engine.num_gpu_blocks:
        return True
    if candidate.model is None or changes_memory(gpu):
        return False
    if (own := has_pools_of_memory(gpu, engine, candidate.model, candidate.kv_dtype)) is not None:
        return own
    if (planned := find_planned_engine(candidate)) is not None:
        return count_planned_blocks(candidate, planned) == engine.num_gpu_blocks
    found = gpu.with_share(engine.memory_share).num_blocks(
        candidate.model,
        candidate.kv_dtype,
        engine.block_size,
        step_tokens=engine.max_num_batched_tokens,
        sequences=engine.max_num_seqs,
    )
    return found.blocks == engine.num_gpu_blocks


def _share_of(candidate: Candidate) -> float:
    """Return the share of a GPU's memory in which the blocks fit: as given, of the timing file, or the engine's."""
    gpu, engine = candidate.settings.gpu, candidate.settings.engine
    assert gpu is not None
    if gpu.gpu_memory_utilization is not None:
        return gpu.gpu_memory_utilization
    fitted = find_engine(engine) if fitted_blocks(engine, gpu) == engine.num_gpu_blocks else None
    return engine.memory_share if fitted is None else fitted.gpu_memory_utilization


def _spell(given: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for flag, value in given.items():
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, dict | list):
            words += [f"--{flag}", json.dumps(value)]
        else:
            words += [f"--{flag}", f"{value:g}" if isinstance(value, float) else str(value)]
    return words

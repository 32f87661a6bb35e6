"""Words of the command that starts one real engine, with flags of the chosen release only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.defaults import BLOCK_SIZE, BatchLimits, is_default
from understudy.engines.chosen import choose_block_size
from understudy.engines.mocker_settings import MockerSettings
from understudy.engines.sglang_config import SglangConfig
from understudy.engines.vllm_config import VllmConfig
from understudy.run.fitted import fitted_blocks
from understudy.run.fitted_times import find_engine
from understudy.server.flags.grammar import vllm_flags
from understudy.server.release import RELEASES
from understudy.sweep.checkpoints import (
    changes_memory,
    has_whole_experts,
    name_of_model,
    name_other_checkpoint,
    quantizes_kv,
    quantizes_weights,
)
from understudy.sweep.group_words import add_group_flags, count_planned_blocks, find_planned_engine
from understudy.tiers.sizes import parse_bytes
from understudy.timing.repositories import find_repository

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig
    from understudy.engines.speculation import SpeculativeConfig
    from understudy.sweep.candidate import Candidate

MODEL = "MODEL"
"""Placeholder of a model that the settings do not name."""
GIB = 1 << 30

_LONG_KNOWN = frozenset(
    (
        *(
            "tensor-parallel-size",
            "data-parallel-size",
            "enable-expert-parallel",
            "max-num-seqs",
            "block-size",
        ),
        *("max-num-batched-tokens", "gpu-memory-utilization", "max-model-len", "enable-prefix-caching"),
        *("enable-chunked-prefill", "scheduling-policy", "kv-cache-dtype", "num-gpu-blocks-override"),
        *("long-prefill-token-threshold", "speculative-config", "quantization", "async-scheduling"),
        *("enable-lora", "max-loras", "kv-events-config"),
    )
)
"""Flags of every simulated vLLM release; for releases whose flags are not recorded."""
_DEFAULTS = VllmConfig()
_LEFT_OUT = (
    "num_gpu_blocks",
    "timing",
    "mocker",
    "tiers",
    "vllm_version",
    "kv_cache_groups",
    "data_parallel_size",
)
_SGLANG_NAMES = {
    "block_size": "page-size",
    "max_num_seqs": "max-running-requests",
    "max_model_len": "context-length",
}
_SGLANG_LEFT_OUT = (
    *("num_gpu_blocks", "timing", "mocker", "tiers", "sglang_version", "data_parallel_size"),
    *("max_num_batched_tokens", "enable_prefix_caching", "load_back_threshold", "hicache_write_policy"),
)


def engine_words(candidate: Candidate, missing: list[str]) -> list[str]:
    """Return the words of the engine's command; append the settings that no flag expresses to `missing`."""
    engine = candidate.settings.engine
    is_sglang = isinstance(engine, SglangConfig)
    words = _sglang_words(candidate, missing) if is_sglang else _vllm_words(candidate, missing)
    for field, default in msgspec.structs.asdict(MockerSettings()).items():
        if getattr(engine.mocker, field) != default:
            missing.append(f"{field}={getattr(engine.mocker, field)}")
    return words


def _vllm_words(candidate: Candidate, missing: list[str]) -> list[str]:
    settings, engine = candidate.settings, candidate.settings.engine
    assert isinstance(engine, VllmConfig)
    known = _list_vllm_flags(engine.vllm_version)
    given: dict[str, Any] = {}
    gpu = settings.gpu
    if gpu is not None:
        given["tensor-parallel-size"] = gpu.tensor_parallel_size
        if has_whole_experts(gpu):
            given["enable-expert-parallel"] = True
        _add_weights(given, candidate)
    if engine.data_parallel_size > 1:
        given["data-parallel-size"] = engine.data_parallel_size
    if _has_estimated_blocks(candidate):
        if (share := _share_of(candidate)) != engine.memory_share:
            given["gpu-memory-utilization"] = share
    else:
        given["num-gpu-blocks-override"] = engine.num_gpu_blocks
    for field in engine.__struct_fields__:
        value = getattr(engine, field)
        if field in _LEFT_OUT or value is None or _chooses_itself(candidate, field):
            continue
        given[field.replace("_", "-")] = msgspec.to_builtins(value, enc_hook=repr)
    if engine.speculative_config is not None:
        given["speculative-config"] = _speculation_of(engine.speculative_config, missing)
    add_group_flags(given, candidate, missing)
    tiers = settings.tiers
    if tiers.tiers:
        host = tiers.tiers[0]
        if tiers.offload.mode == "vllm" and host.bytes is not None:
            given["kv-offloading-size"] = parse_bytes("g2.bytes", host.bytes) / GIB
        else:
            missing.append("KV tiers (in vLLM: --kv-offloading-size, which replays as itself)")
    unknown = [flag for flag in given if flag not in known]
    missing += [f"{flag}={given.pop(flag)}" for flag in unknown]
    return ["vllm", "serve", _name_model(candidate, missing), *_spell(given)]


def _speculation_of(speculation: SpeculativeConfig, missing: list[str]) -> dict[str, Any]:
    """Return the settings that vLLM has too: not the acceptance, which is the traffic's."""
    own = ("accept_rates", "acceptance_per_position", "seed")
    if speculation.model is None and speculation.method in ("eagle", "eagle3", "draft_model"):
        missing.append("the drafter's checkpoint: name it as model in --speculative-config")
    plain: dict[str, Any] = msgspec.to_builtins(speculation)
    return {
        name: value
        for name, value in plain.items()
        if name not in own and value is not None and value is not False
    }


def _chooses_itself(candidate: Candidate, field: str) -> bool:
    """Whether vLLM chooses the value of a field without a flag.

    Its limits follow from the GPU: without a known one they are not those of the run.
    """
    value = getattr(candidate.settings.engine, field)
    if field == "block_size":
        model = candidate.model
        return bool(value == (BLOCK_SIZE if model is None else choose_block_size(model)))
    if field in BatchLimits._fields:
        return candidate.settings.gpu is not None and is_default(value)
    return bool(value == getattr(_DEFAULTS, field))


def _sglang_words(candidate: Candidate, missing: list[str]) -> list[str]:
    settings, engine = candidate.settings, candidate.settings.engine
    assert isinstance(engine, SglangConfig)
    given: dict[str, Any] = {}
    if settings.gpu is not None:
        given["tp-size"] = settings.gpu.tensor_parallel_size
        if has_whole_experts(settings.gpu):
            given["ep-size"] = settings.gpu.num_gpus
        elif settings.gpu.expert_parallel_size not in (None, 1):
            given["ep-size"] = settings.gpu.expert_parallel_size
        if settings.gpu.disable_hybrid_kv_cache_manager:
            given["disable-hybrid-swa-memory"] = True
        _add_weights(given, candidate)
    if engine.data_parallel_size > 1:
        given["dp-size"] = engine.data_parallel_size
    if _has_estimated_blocks(candidate):
        given["mem-fraction-static"] = _share_of(candidate)
    else:
        given["max-total-tokens"] = engine.num_gpu_blocks * engine.block_size
    defaults = SglangConfig()
    for field in engine.__struct_fields__:
        value = getattr(engine, field)
        if field in _SGLANG_LEFT_OUT or value is None:
            continue
        if field in ("block_size", "chunked_prefill_size") or value != getattr(defaults, field):
            given[_SGLANG_NAMES.get(field, field.replace("_", "-"))] = value
    if settings.tiers.tiers:
        host = settings.tiers.tiers[0]
        given["enable-hierarchical-cache"] = True
        if host.bytes is not None:
            given["hicache-size"] = max(1, round(parse_bytes("g2.bytes", host.bytes) / 1e9))
        else:
            missing.append("hicache-size (give --g2-bytes to have it)")
        given["hicache-write-policy"] = engine.hicache_write_policy
    model = _name_model(candidate, missing)
    return ["python", "-m", "sglang.launch_server", "--model-path", model, *_spell(given)]


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


def _add_weights(given: dict[str, Any], candidate: Candidate) -> None:
    """Add the types of KV cache and weights."""
    if quantizes_kv(candidate):
        given["kv-cache-dtype"] = "fp8_e4m3" if isinstance(candidate.settings.engine, SglangConfig) else "fp8"
    if quantizes_weights(candidate):
        given["quantization"] = "fp8"


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


def _list_vllm_flags(version: str) -> frozenset[str]:
    """Return the names of a release's flags, without dashes; for releases that are not recorded, a safe few."""
    numbers = re.match(r"v?(\d+\.\d+)", version)
    for release in RELEASES:
        if numbers is not None and release.version.startswith(f"{numbers[1]}."):
            return frozenset(name.removeprefix("--") for name in vllm_flags(release.version))
    return _LONG_KNOWN


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


def engine_image(engine: EngineConfig) -> str:
    """Return the container image of an engine's release."""
    if isinstance(engine, SglangConfig):
        return f"lmsysorg/sglang:v{engine.sglang_version}"
    assert isinstance(engine, VllmConfig)
    numbers = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?.*", engine.vllm_version)
    return (
        f"vllm/vllm-openai:v{numbers[1]}.{numbers[2]}.{numbers[3] or 0}"
        if numbers
        else "vllm/vllm-openai:latest"
    )

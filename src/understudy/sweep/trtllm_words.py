"""Flags of a `trtllm-serve` command that other engines lack, and options that only its file of options has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.sweep.checkpoints import has_whole_experts
from understudy.sweep.own_words import OwnWords

if TYPE_CHECKING:
    from understudy.sweep.candidate import Candidate
    from understudy.tiers.gpu import GpuSettings

_FLAGS = frozenset(
    (
        *("tp_size", "ep_size", "max_batch_size", "max_num_tokens", "max_seq_len"),
        *("kv_cache_free_gpu_memory_fraction", "kv_cache_dtype", "enable_chunked_prefill"),
    )
)
_POOL = "kv_cache_config.max_tokens"


class TrtllmWords(OwnWords):
    """Flags of TensorRT-LLM."""

    def add_parallelism(self, given: dict[str, Any], gpu: GpuSettings) -> None:
        """Set the flag of expert parallelism."""
        if has_whole_experts(gpu):
            given["ep_size"] = gpu.num_gpus
        elif gpu.expert_parallel_size not in (None, 1):
            given["ep_size"] = gpu.expert_parallel_size

    def add_features(self, given: dict[str, Any], candidate: Candidate, missing: list[str]) -> None:
        """Move options without a flag to `missing`, as lines of the file of options."""
        super().add_features(given, candidate, missing)
        engine: Any = candidate.settings.engine
        if _POOL in given:
            given[_POOL] = int(engine.num_gpu_blocks * engine.block_size * engine.max_util_for_resume)
        if "kv-cache-dtype" in given:
            given["kv_cache_dtype"] = given.pop("kv-cache-dtype")
        others = [name for name in given if name not in _FLAGS]
        missing += [f"{name}: {given.pop(name)} (in the file of --extra_llm_api_options)" for name in others]

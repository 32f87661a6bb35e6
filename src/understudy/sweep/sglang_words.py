"""Flags of an SGLang command that other engines lack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.sweep.checkpoints import has_whole_experts, name_of_model
from understudy.sweep.own_words import OwnWords
from understudy.tiers.model_shape import count_kv_parts
from understudy.tiers.sizes import parse_bytes

if TYPE_CHECKING:
    from understudy.sweep.candidate import Candidate
    from understudy.tiers.gpu import GpuSettings


class SglangWords(OwnWords):
    """Flags of SGLang."""

    def add_parallelism(self, given: dict[str, Any], gpu: GpuSettings) -> None:
        """Set the flags of expert parallelism and of the hybrid KV cache."""
        if has_whole_experts(gpu):
            given["ep-size"] = gpu.num_gpus
        elif gpu.expert_parallel_size not in (None, 1):
            given["ep-size"] = gpu.expert_parallel_size
        if gpu.disable_hybrid_kv_cache_manager:
            given["disable-hybrid-swa-memory"] = True

    def add_features(self, given: dict[str, Any], candidate: Candidate, missing: list[str]) -> None:
        """Set the flags of HiCache; append its size to `missing` if SGLang's flag, whole GB per GPU, cannot say it."""
        settings = candidate.settings
        if not settings.tiers.tiers:
            return
        host = settings.tiers.tiers[0]
        given["enable-hierarchical-cache"] = True
        if host.bytes is None:
            missing.append("hicache-size (give --g2-bytes to have it)")
        else:
            gpus = 1 if settings.gpu is None else settings.gpu.tensor_parallel_size
            parts = count_kv_parts(name_of_model(candidate), gpus)
            size = parse_bytes("g2.bytes", host.bytes)
            per_gpu_gb, rest = divmod(size, parts * 10**9)
            if rest or not per_gpu_gb:
                nearest = max(per_gpu_gb, 1) * parts
                missing.append(
                    f"hicache-size ({size:,} bytes are no whole GB on each of {parts} GPUs; give --g2-bytes "
                    f"{nearest}GB)"
                )
            else:
                given["hicache-size"] = per_gpu_gb
        given["hicache-write-policy"] = settings.engine.host_write_policy

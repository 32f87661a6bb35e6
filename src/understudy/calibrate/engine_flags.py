"""Engine settings of benchmarks, for files that do not contain them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from understudy.defaults import STATIC_SHARE
from understudy.engines.profiles import NEWEST, find_profile


class EngineFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Engine settings of the benchmarks, for files that do not contain them; None: vLLM's for the GPU."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_gpu_blocks: int | None = None
    enable_prefix_caching: bool = True
    vllm_version: str = NEWEST
    gpu_memory_utilization: float | None = None
    engine: Literal["vllm", "sglang"] = "vllm"
    """Engine that was measured; its load is replayed with vLLM's rules."""

    def given(self) -> dict[str, Any]:
        """Return the settings that were given, by name."""
        settings = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        del settings["engine"]
        return settings

    @property
    def memory_share(self) -> float:
        """Share of the GPU's memory that the engine took: as given, or its default."""
        if self.gpu_memory_utilization is not None:
            return self.gpu_memory_utilization
        return STATIC_SHARE if self.engine == "sglang" else find_profile(self.vllm_version).memory_share

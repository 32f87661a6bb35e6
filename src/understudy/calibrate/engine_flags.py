"""Engine settings of benchmarks, for files that do not contain them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from understudy.engines.kinds.registry import find_kind
from understudy.engines.profiles import NEWEST

if TYPE_CHECKING:
    from understudy.engines.engine_config import EngineConfig


class EngineFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Engine settings of the benchmarks, for files that do not contain them; None: vLLM's for the GPU."""

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_gpu_blocks: int | None = None
    enable_prefix_caching: bool = True
    vllm_version: str = NEWEST
    gpu_memory_utilization: float | None = None
    engine: str = "vllm"
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
        return self.measured_engine.memory_share

    @property
    def version(self) -> str:
        """Release of the engine that was measured."""
        return find_kind(self.engine).version_of(self.measured_engine)

    @property
    def measured_engine(self) -> EngineConfig:
        """An engine of the kind and the release that were measured; SGLang has one release."""
        kind = find_kind(self.engine)
        given = {"vllm_version": self.vllm_version}
        known = {name: value for name, value in given.items() if name == kind.version_setting}
        return kind.config_class.from_dict(known)

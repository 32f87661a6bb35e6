"""`OwnWords`: flags of a command that one kind of engine has and others lack."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from understudy.engines.kinds.registry import kind_of

if TYPE_CHECKING:
    from understudy.sweep.candidate import Candidate
    from understudy.tiers.gpu import GpuSettings


class OwnWords:
    """Flags of an engine that has none of its own; kinds with such flags derive from it."""

    def add_parallelism(self, given: dict[str, Any], gpu: GpuSettings) -> None:
        """Set the flags that divide a model over GPUs, besides tensor and data parallelism."""

    def chooses_itself(self, candidate: Candidate, field: str) -> bool:
        """Whether the engine has the value of a setting without a flag."""
        engine = candidate.settings.engine
        return bool(getattr(engine, field) == getattr(kind_of(engine).config_class(), field))

    def add_features(self, given: dict[str, Any], candidate: Candidate, missing: list[str]) -> None:  # noqa: ARG002
        """Set the flags of tiers and other features; append settings that no flag expresses to `missing`."""
        if candidate.settings.tiers.tiers:
            missing.append("KV tiers")

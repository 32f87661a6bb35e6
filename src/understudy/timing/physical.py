"""`Physical`: step times computed from what a GPU reads and computes, with their origin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from understudy._core import pipelined_timing
from understudy.errors import ConfigError
from understudy.timing.coefficients import StepCoefficients  # noqa: TC001 (msgspec reads it)
from understudy.timing.deployment import Deployment  # noqa: TC001 (the same)
from understudy.timing.efficiencies import Efficiencies  # noqa: TC001 (the same)
from understudy.timing.fitted_engine import FittedEngine  # noqa: TC001 (the same)

if TYPE_CHECKING:
    from understudy._core import StepTiming


class Residuals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Errors of a fit: median |simulated / measured − 1|, in percent."""

    ttft_percent: float | None = None
    tpot_percent: float | None = None
    e2e_percent: float | None = None
    measurements: int = 0


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source of step times, as reports show it."""

    source: Literal[
        "preset", "data sheet", "calibrated", "op tables", "aiconfigurator", "recorded steps", "coefficients"
    ] = "coefficients"
    detail: str = ""
    """Details for readers: the model, the GPU, the parallelism, warnings."""
    residuals: Residuals | None = None

    def text(self) -> str:
        """Describe the source in one line."""
        words = [f"{self.source}: {self.detail}" if self.detail else self.source]
        if self.residuals is not None:
            found = [
                f"{name} {value:.1f} %"
                for name, value in (
                    ("TTFT", self.residuals.ttft_percent),
                    ("TPOT", self.residuals.tpot_percent),
                    ("E2E", self.residuals.e2e_percent),
                )
                if value is not None
            ]
            words.append(f"off by {', '.join(found)} (median of {self.residuals.measurements})")
        return "; ".join(words)


class Domain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Largest step sizes that a fit covered; None: no limit."""

    tokens: int | None = None
    requests: int | None = None
    context_tokens: int | None = None
    prompt_tokens: int | None = None


class Basis(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Deployment and efficiencies that step times were computed from, for the times of a drafter."""

    deployment: Deployment
    efficiencies: Efficiencies


class Physical(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="physical"
):
    """Timing model that computes a step's time from what a GPU reads and computes in it."""

    coefficients: StepCoefficients
    stages: tuple[StepCoefficients, ...] = ()
    """Coefficients of each stage of a pipeline, which `coefficients` sums up; empty: one stage."""
    origin: Origin = Origin()
    domain: Domain = Domain()
    front_end_ms: float = 0.0
    """Time of a request outside the engine until its first token: 60 % before the engine, 40 % after."""
    fitted_for: Deployment | None = None
    """Deployment that the times were fitted to; settings of another deployment are rejected."""
    fitted_engine: FittedEngine | None = None
    """Engine of that deployment, if the timing file has it."""

    basis: Basis | None = None
    """Origin of the coefficients; None: a drafter cannot be timed."""

    def __post_init__(self) -> None:
        if not 0 <= self.front_end_ms < float("inf"):
            raise ConfigError(f"timing.front_end_ms must be a finite number from 0, got {self.front_end_ms}")

    def describe_origin(self) -> str:
        """Describe the source of the times."""
        return self.origin.text()

    def build(self) -> StepTiming:
        """Build the native timing model."""
        limits = {f"most_{name}": getattr(self.domain, name) for name in self.domain.__struct_fields__}
        if self.stages:
            return pipelined_timing([stage.build(**limits) for stage in self.stages])
        return self.coefficients.build(**limits)

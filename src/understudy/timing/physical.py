"""Step times of a GPU: coefficients, where they come from, and what they were fitted on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from understudy.errors import ConfigError
from understudy.timing.coefficients import StepCoefficients  # noqa: TC001 (msgspec reads it)
from understudy.timing.deployment import Deployment  # noqa: TC001 (the same)

if TYPE_CHECKING:
    from understudy._core import StepTiming


class Residuals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far simulated times were from measured ones in the fit: median |simulated / measured − 1|."""

    ttft_percent: float | None = None
    tpot_percent: float | None = None
    e2e_percent: float | None = None
    measurements: int = 0


class Origin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where step times come from, as every report says it."""

    source: Literal[
        "preset", "data sheet", "calibrated", "op tables", "aiconfigurator", "recorded steps", "coefficients"
    ] = "coefficients"
    detail: str = ""
    """What a person wants to read beside it: the model, the GPU, how they are spread, a warning."""
    residuals: Residuals | None = None

    def text(self) -> str:
        """In one line."""
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
    """The most that steps had of each where the numbers were fitted; None: as many as you like."""

    tokens: int | None = None
    requests: int | None = None
    context_tokens: int | None = None
    prompt_tokens: int | None = None


class Physical(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="physical"
):
    """A step from what a GPU has to read and to compute in it, timed as a whole."""

    coefficients: StepCoefficients
    origin: Origin = Origin()
    domain: Domain = Domain()
    front_end_ms: float = 0.0
    """What a request spends outside the engine until its first token is out: 60 % before it, 40 % after."""
    fitted_for: Deployment | None = None
    """Whose times they are, where they were measured on one deployment; settings of another are refused."""

    def __post_init__(self) -> None:
        if not 0 <= self.front_end_ms < float("inf"):
            raise ConfigError(f"timing.front_end_ms must be finite and not negative, got {self.front_end_ms}")

    def describe_origin(self) -> str:
        """Where its times come from."""
        return self.origin.text()

    def build(self, speedup_ratio: float, decode_speedup_ratio: float) -> StepTiming:
        """The native model."""
        limits = {f"most_{name}": getattr(self.domain, name) for name in self.domain.__struct_fields__}
        return self.coefficients.build(speedup_ratio, decode_speedup_ratio, **limits)

"""Timing models from measurements, as settings: op tables in a folder, AIConfigurator's database, recorded steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from understudy._core import python_timing
from understudy.errors import ConfigError
from understudy.timing.aiconfigurator import AiconfiguratorSteps, aiconfigurator_version
from understudy.timing.deployment import Deployment  # noqa: TC001  (msgspec reads the annotations)
from understudy.timing.efficiencies import Efficiencies  # noqa: TC001  (the same)
from understudy.timing.op_tables import OpTables
from understudy.timing.physical import Origin
from understudy.timing.recorded.record import Record

if TYPE_CHECKING:
    from understudy._core import StepTiming


class _Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    front_end_ms: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.front_end_ms < float("inf"):
            raise ConfigError(f"timing.front_end_ms must be finite and not negative, got {self.front_end_ms}")


class MeasuredKernels(_Measured, frozen=True, kw_only=True, tag="op_tables"):
    """Steps from op tables, interpolated."""

    folder: str
    deployment: Deployment
    efficiencies: Efficiencies
    """Of communication between GPUs, which the tables do not have."""
    extrapolate: bool = False

    def describe_origin(self) -> str:
        """Where its times come from."""
        ends = ", extrapolated where they end" if self.extrapolate else ""
        detail = f"{self.folder}, {_words(self.deployment)}{ends}"
        return Origin(source="op tables", detail=detail).text()

    def build(self, speedup_ratio: float, decode_speedup_ratio: float) -> StepTiming:
        """The native model. ConfigError names the file and the column that is missing."""
        tables = OpTables(Path(self.folder), self.deployment, self.efficiencies, extrapolate=self.extrapolate)
        return tables.build(speedup_ratio, decode_speedup_ratio)


class Aiconfigurator(_Measured, frozen=True, kw_only=True, tag="aiconfigurator"):
    """Steps from AIConfigurator's database of kernels; asked once a step."""

    deployment: Deployment

    def describe_origin(self) -> str:
        """Where its times come from."""
        detail = (
            f"{aiconfigurator_version()}, kernels of {_words(self.deployment)}, nothing added for the engine"
        )
        return Origin(source="aiconfigurator", detail=detail).text()

    def build(self, speedup_ratio: float, decode_speedup_ratio: float) -> StepTiming:
        """The native model. ConfigError names what the package does not cover."""
        return python_timing(self.model(), speedup_ratio, decode_speedup_ratio)

    def model(self) -> AiconfiguratorSteps:
        """The model in Python."""
        return AiconfiguratorSteps(self.deployment)


class RecordedSteps(_Measured, frozen=True, kw_only=True, tag="recorded_steps"):
    """Steps as the real engine took them (`understudy qwen3 bench --record`), fitted; asked once a step."""

    path: str

    def describe_origin(self) -> str:
        """Where its times come from."""
        about = self.record().about
        detail = f"{self.path}, a fit of {about.get('model', 'the real engine')}'s"
        return Origin(source="recorded steps", detail=detail).text()

    def build(self, speedup_ratio: float, decode_speedup_ratio: float) -> StepTiming:
        """The native model. ConfigError names the line at fault."""
        return python_timing(self.record().fit(), speedup_ratio, decode_speedup_ratio)

    def record(self) -> Record:
        """The file."""
        return Record.read(Path(self.path))


def _words(deployment: Deployment) -> str:
    gpus = deployment.parallel.tensor * deployment.parallel.data
    return f"{deployment.model.name} in {deployment.weights} on {gpus} × {deployment.gpu.name}"

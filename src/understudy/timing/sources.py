"""Timing models from measurements: op tables, AIConfigurator's database, recorded steps."""

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
from understudy.timing.physical import Basis, Origin
from understudy.timing.presets import preset
from understudy.timing.recorded.record import Record

if TYPE_CHECKING:
    from understudy._core import StepTiming


class _Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"):
    front_end_ms: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.front_end_ms < float("inf"):
            raise ConfigError(f"timing.front_end_ms must be a finite number from 0, got {self.front_end_ms}")


class MeasuredKernels(_Measured, frozen=True, kw_only=True, tag="op_tables"):
    """Timing model that interpolates op tables."""

    folder: str
    deployment: Deployment
    efficiencies: Efficiencies
    """Efficiencies for the communication between GPUs, which the tables lack."""
    extrapolate: bool = False

    @property
    def basis(self) -> Basis:
        """Deployment and efficiencies, for the times of a drafter, which the tables lack."""
        return Basis(deployment=self.deployment, efficiencies=self.efficiencies)

    def describe_origin(self) -> str:
        """Describe the source of the times."""
        ends = ", extrapolated past their ends" if self.extrapolate else ""
        detail = f"{self.folder}, {_describe(self.deployment)}{ends}"
        return Origin(source="op tables", detail=detail).text()

    def build(self) -> StepTiming:
        """Build the native timing model. ConfigError names the file and the missing column."""
        tables = OpTables(Path(self.folder), self.deployment, self.efficiencies, extrapolate=self.extrapolate)
        return tables.build()


class Aiconfigurator(_Measured, frozen=True, kw_only=True, tag="aiconfigurator"):
    """Timing model of AIConfigurator's kernel database, called once per step."""

    deployment: Deployment

    @property
    def basis(self) -> Basis:
        """Deployment and the preset's efficiencies, for the times of a drafter."""
        own = self.deployment
        found = preset(own.model, own.gpu, own.weights, own.kv)
        return Basis(deployment=own, efficiencies=found.efficiencies)

    def describe_origin(self) -> str:
        """Describe the source of the times."""
        detail = (
            f"{aiconfigurator_version()}, kernels of {_describe(self.deployment)}, without engine overhead"
        )
        return Origin(source="aiconfigurator", detail=detail).text()

    def build(self) -> StepTiming:
        """Build the native timing model. ConfigError names what the package does not cover."""
        return python_timing(self.model())

    def model(self) -> AiconfiguratorSteps:
        """Create the timing model in Python."""
        return AiconfiguratorSteps(self.deployment)


class RecordedSteps(_Measured, frozen=True, kw_only=True, tag="recorded_steps"):
    """Timing model fitted to recorded steps (`understudy qwen3 bench --record`), called once per step."""

    path: str

    def describe_origin(self) -> str:
        """Describe the source of the times."""
        about = self.record().about
        detail = f"{self.path}, fitted to {about.get('model', 'the real engine')}"
        return Origin(source="recorded steps", detail=detail).text()

    def build(self) -> StepTiming:
        """Build the native timing model. ConfigError names the invalid line."""
        return python_timing(self.record().fit())

    def record(self) -> Record:
        """Read the recorded steps."""
        return Record.read(Path(self.path))


def _describe(deployment: Deployment) -> str:
    gpus = deployment.parallel.gpus
    return f"{deployment.model.name} in {deployment.weights} on {gpus} × {deployment.gpu.describe()}"

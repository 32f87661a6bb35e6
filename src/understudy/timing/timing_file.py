"""`TimingFile`: fitted parameters and their origin, as `calibrate` writes and `--timing` reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from understudy.errors import ConfigError
from understudy.timing.architecture import Architecture
from understudy.timing.deployment import Deployment, Parallelism
from understudy.timing.efficiencies import Efficiencies
from understudy.timing.fitted_engine import FittedEngine  # noqa: TC001  (the same)
from understudy.timing.gpus import Gpu  # noqa: TC001  (the same)
from understudy.timing.physical import Basis, Domain, Origin, Physical, Residuals
from understudy.yaml_text import read_yaml

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
_NEWER = (
    *(
        "shared_layers",
        "state_bytes",
        "latent",
        "indexer",
        "full_kv_heads",
        "full_head_dim",
        "gated_attention",
    ),
    *("mlp_layers", "mlp_matrices", "expert_input", "int4_group", "narrow"),
)
"""Fields of a model that older files lack."""
_CLOSE = 0.02
"""Relative distance below which a value counts as the preset."""


class FittedNumber(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fitted efficiency."""

    name: str
    value: float
    plus_minus_percent: float
    """One standard deviation."""
    preset: float
    determined: bool
    """False: the data hardly narrow the prior around the preset, or contradict the peak; files of this version then
    have the preset."""
    times_peak: float | None = None
    """Share of the peak that the data asked for, if it exceeded 1, which is impossible."""

    def describe_determination(self) -> str:
        """Return whether the data determine the value, and else its distance from the preset."""
        if self.determined:
            return "yes"
        if self.value == self.preset:
            return "no: held at the preset"
        change = self.value / self.preset - 1 if self.preset else 0.0
        if abs(change) < _CLOSE:
            return "no: it stayed at the preset"
        return f"no: {abs(change):.0%} {'above' if change > 0 else 'below'} the preset".replace("%", " %")


class FittedInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fitted benchmark and the errors of the fit: simulated / measured − 1, in percent."""

    file: str
    sha256: str
    format: str
    requests: int
    ttft_percent: float | None = None
    tpot_percent: float | None = None
    e2e_percent: float | None = None


class TimingFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of a timing file, with the full GPU and model, so that later versions read the same numbers."""

    understudy_timing: int = FORMAT
    date: str
    understudy: str
    model: Architecture
    gpu: Gpu
    weights: str
    kv: str
    parallel: Parallelism
    engine: FittedEngine | None = None
    """Engine of the deployment and its KV pool; older files lack it."""
    efficiencies: Efficiencies
    fitted: tuple[FittedNumber, ...]
    inputs: tuple[FittedInput, ...]
    residuals: Residuals
    domain: Domain

    @classmethod
    def read(cls, path: Path) -> TimingFile:
        """Read a timing file. ConfigError names the file and the key."""
        content = read_yaml(path)
        if not isinstance(content, dict) or "understudy_timing" not in content:
            raise ConfigError(
                f"{path} is not a timing file: understudy_timing is missing; write one with understudy calibrate"
            )
        if content["understudy_timing"] != FORMAT:
            raise ConfigError(
                f"{path}: understudy_timing must be {FORMAT} for this version, got {content['understudy_timing']!r}"
            )
        try:
            return msgspec.convert(content, cls)
        except (msgspec.ValidationError, ConfigError) as error:
            raise ConfigError(f"{path}: {error}") from error

    def text(self) -> str:
        """Return the file as YAML."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        defaults = {field.name: field.default for field in msgspec.structs.fields(Architecture)}
        for name in _NEWER:  # files of other models stay as they were
            if plain["model"][name] == defaults[name]:
                del plain["model"][name]
        usual = {field.name: field.default for field in msgspec.structs.fields(Efficiencies)}
        for name in ("expert_imbalance", "softness"):
            if plain["efficiencies"][name] == usual[name]:
                del plain["efficiencies"][name]
        if not plain["gpu"]["like"]:
            del plain["gpu"]["like"]
        if plain["engine"] is None:
            del plain["engine"]
        body: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=110)
        return (
            "# Step times of one deployment, fitted to benchmarks: understudy replay TRACE --timing THIS_FILE\n"
            + body
        )

    @property
    def deployment(self) -> Deployment:
        """Deployment that the times were fitted to."""
        return Deployment(
            model=self.model, gpu=self.gpu, weights=self.weights, kv=self.kv, parallel=self.parallel
        )

    def timing(self) -> Physical:
        """Build the timing model, with its origin, residuals and the domain of the fit."""
        parallel = self.parallel
        detail = (
            f"{self.model.name} in {self.weights} on {parallel.gpus} × {self.gpu.name}, fitted "
            f"{self.date} to {', '.join(one.file for one in self.inputs)}"
        )
        return Physical(
            coefficients=self.deployment.coefficients(self.efficiencies),
            origin=Origin(source="calibrated", detail=detail, residuals=self.residuals),
            domain=self.domain,
            front_end_ms=self.efficiencies.front_end_ms,
            fitted_for=self.deployment,
            basis=Basis(deployment=self.deployment, efficiencies=self.efficiencies),
            fitted_engine=self.engine,
        )

    def setting(self) -> dict[str, Any]:
        """Return the timing model as the setting `engine.timing`."""
        timing: dict[str, Any] = msgspec.to_builtins(self.timing())
        return timing
